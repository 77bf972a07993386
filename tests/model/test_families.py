"""Every family of models: what is computed packed, generated, trained and saved is what transformers has."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.engines.contract import SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.servers.model import ModelFacts
from agentrl.model.packed import token_logprobs, use_packed_attention
from agentrl.model.stateful import unbound_time_steps
from agentrl.trajectory.batch import RaggedBatch
from tests.conftest import PROJECT
from tests.model.families import FAMILIES, HYBRIDS, SIZES, batch, make_model, one_by_one
from tests.trained import trained_batch
from tests.workers.conftest import fsdp
from tests.workers.made import policy_worker


def test_the_docs_name_them() -> None:
    text = (PROJECT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| ([^|]*) \|", text[: text.index("## Mixtures")], re.MULTILINE)
    named = {name for row in rows[1:] for name in row.split(", ")}
    assert named - {"---"} >= {name.split(",")[0] for name in FAMILIES | HYBRIDS}


class NoTokenizer:
    """In the place of a tokenizer that is to be exported."""

    def save_pretrained(self, directory: Path) -> None:
        pass


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3.5"])
def test_packed_equals_one_by_one_with_gradients(name: str) -> None:
    assert_packed_is_one_by_one(name)


def assert_packed_is_one_by_one(name: str) -> None:
    own, model = make_model(name), use_packed_attention(make_model(name))
    unbound_time_steps(own)  # as training runs Nemotron-H
    ids, offsets = batch()
    expected, entropy = one_by_one(own, ids, offsets, 0.8)
    logprobs, spread, *_ = token_logprobs(model, ids, offsets, temperature=0.8, needs=frozenset({"entropy"}))
    assert spread is not None
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(spread, entropy, atol=1e-5)
    weights = torch.linspace(-1, 1, len(ids))
    (expected @ weights + entropy.sum()).backward()
    (logprobs @ weights + spread.sum()).backward()
    for (key, want), got in zip(own.named_parameters(), model.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None, key
        assert torch.allclose(got.grad, want.grad, atol=1e-4 * float(want.grad.abs().max()) + 1e-7), key


Dialogue = tuple[list[int], dict[int, float]]
"""Ids, and the log-probs of the generated ones by their places."""


async def dialogue(engine: EmbeddedEngine, prompt: list[int], turns: list[int], name: str) -> Dialogue:
    ids = list(prompt)
    logprobs: dict[int, float] = {}
    for turn, more in enumerate([0, *turns]):
        ids += [(5 * i + turn) % SIZES["vocab_size"] for i in range(more)]
        generation = await engine.generate(ids, SamplingParams(6, seed=turn + len(name)), name)
        logprobs |= {len(ids) + place: value for place, value in enumerate(generation.logprobs)}
        ids = ids + generation.ids
    return ids, logprobs


async def dialogues(engine: EmbeddedEngine) -> list[Dialogue]:
    """Of one prompt and another, with a few and with many new tokens in a turn."""
    prompts = [[7 * i % 61 for i in range(20)], [11 * i % 61 for i in range(4)]]
    turns = [[3, 2], [40, 3], [35], [1]]
    calls = [dialogue(engine, prompts[i == 3], turns[i], "x" * i) for i in range(4)]
    return list(await asyncio.gather(*calls))


@torch.no_grad()
def assert_sampled_from(model: PreTrainedModel, found: list[Dialogue]) -> None:
    for ids, logprobs in found:
        expected = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for place, value in logprobs.items():
            assert value == pytest.approx(float(expected[place - 1, ids[place]]), abs=1e-4)


def grouped_batch() -> RaggedBatch:
    ids, offsets = batch()
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[offsets[:-1]] = False
    count = len(offsets) - 1
    advantages = torch.linspace(-1, 1, count).repeat_interleave(offsets.diff()) * mask
    return trained_batch(offsets, ids, mask, torch.arange(count) // 4, advantages=advantages)


@pytest.mark.slice(6, "matrix")
@pytest.mark.parametrize("name", FAMILIES)
async def test_generated_trained_and_saved(name: str, tmp_path: Path) -> None:
    own = make_model(name)
    own.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    engine = EmbeddedEngine(make_model(name), max_num_seqs=8, max_model_len=128)
    assert_sampled_from(own, await dialogues(engine))

    worker = policy_worker(
        ModelConfig(path=str(tmp_path / "model")),
        ActorConfig(optim=OptimConfig(name="muon", lr=1e-2, adamw_lr=1e-2)),
        device="cpu",
        temperature=1.0,
        log_prob_max_tokens=4096,
        total_steps=10,
        seed=0,
    )
    before = {key: tensor.clone() for key, tensor in fsdp(worker).named_tensors()}
    buffers = {key for key, _ in own.named_buffers()}
    assert set(before) | (buffers & set(saved)) == set(saved)
    assert all(torch.equal(tensor, saved[key]) for key, tensor in before.items())
    assert {key: tuple(tensor.shape) for key, tensor in before.items()} == dict(worker.weights().shapes)
    ModelFacts.from_path(str(tmp_path / "model")).check(worker.weights().alone())

    assert worker.update(grouped_batch(), step=1)["actor/grad_norm"] > 0
    assert not any(torch.equal(tensor, before[key]) for key, tensor in fsdp(worker).named_tensors())
    worker.export(tmp_path / "export", NoTokenizer())  # type: ignore[arg-type]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    await engine.update_weights(worker.weights().alone(), 1)
    assert_sampled_from(trained, await dialogues(engine))
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == saved.keys()
