"""A model with a state on a real vLLM server, and models whose layers vLLM cannot run on a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.config.sections.model import PlainModelConfig
from agentrl.engines.contract import SamplingParams
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync import TensorSender
from agentrl.engines.vllm.build import check_family
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.engines.weights import Weights
from agentrl.errors import ConfigError
from agentrl.model.stateful import unbound_time_steps
from agentrl.quickstart.tiny_policy import PLAIN_ENGLISH, train_tokenizer
from agentrl.system.http import http_client
from tests.engines.test_hybrids import check, own_logprobs
from tests.model.families import make_model
from tests.vllm.conftest import PacedArguments, running
from tests.waiting import until

PROMPT = list(range(5, 30))
LENGTH = 1024
LONG = 600
"""Tokens of an answer that goes on until its weights are changed: 3 s and more, by the pace of `tests.vllm.paced`."""


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    """A Falcon-H1 with heads that vLLM's attention on a CPU takes, in the folder `model`."""
    tokenizer = train_tokenizer(PLAIN_ENGLISH, 400)
    model = make_model(
        "falcon-h1", head_dim=32, hidden_size=128, vocab_size=len(tokenizer), max_position_embeddings=LENGTH
    )
    unbound_time_steps(model)
    scaled(model, 0.3)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return model


@pytest.fixture
def serving(model: PreTrainedModel, tmp_path: Path) -> Iterator[VLLMProcess]:
    arguments = PacedArguments(str(tmp_path / "model"), "cpu", "float32", context_length=LENGTH, max_num_seqs=4)
    with running(arguments, tmp_path) as process:
        yield process


@torch.no_grad()
def scaled(model: PreTrainedModel, factor: float) -> None:
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.mul_(factor)


async def test_a_state_is_computed_again_with_new_weights(serving: VLLMProcess, model: PreTrainedModel) -> None:
    http = http_client()
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    engine = VLLMEngine(
        [Server(VLLMClient(serving.url, http, serving.key))],
        http,
        ModelFacts(model.config.vocab_size, shapes),
        TensorSender(torch.float32, 1 << 20),
        max_model_len=LENGTH,
        deterministic=True,
    )
    params = SamplingParams(LONG, temperature=1.0, seed=3)
    try:
        whole = await engine.generate(PROMPT, params, "a")
        check(model, PROMPT, whole)
        call = asyncio.create_task(engine.generate(PROMPT, params, "b"))
        await until(lambda: any(running.partial.ids for running in engine._calls.values()))
        scaled(model, 1.1)
        await engine.update_weights(Weights.from_tensors(model.named_parameters()), 1)
        changed = await call
        assert [span.version for span in changed.versions] == [0, 1]
        change = changed.versions[1].start
        assert changed.ids[:change] == whole.ids[:change]
        expected = own_logprobs(model, PROMPT + changed.ids, len(PROMPT) + change)
        assert len(changed.ids) == LONG
        assert torch.allclose(torch.tensor(changed.logprobs[change:]), expected, atol=1e-5, rtol=0)
    finally:
        await engine.close()


def test_gated_delta_layers_are_refused_on_a_cpu_before_a_server_starts(tmp_path: Path) -> None:
    make_model("qwen3-next").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="gated delta layers of the family qwen3_next run in bfloat16 alone"):
        check_family(PlainModelConfig(path=str(tmp_path)), "cpu")
    check_family(PlainModelConfig(path=str(tmp_path)), "cuda")
