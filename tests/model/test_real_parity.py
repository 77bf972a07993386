"""Log-probs and gradients of a real model are those of transformers: on problems of GSM8K with their solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.model.packed import load_model, token_logprobs
from agentrl.parallel import gradients
from agentrl.workers import learner
from tests.model.families import one_by_one
from tests.real_model import cut_model, find_model
from tests.trained import trained_batch
from tests.workers.conftest import fsdp
from tests.workers.made import policy_worker


@pytest.fixture(scope="module")
def whole_model(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return find_model(pytestconfig, tmp_path_factory.mktemp("model"))


def read_problems(
    model: Path, shared_data: Path, count: int, each: int = 1
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Conversations of the first problems, `each` times in a row: ids [T], offsets [N + 1], lengths of the prompts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids, offsets, prompts = [], [0], []
    for line in (shared_data / "data/gsm8k/test.jsonl").read_text().splitlines()[:count]:
        row = json.loads(line)
        asked = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        for repeat in range(each):
            answer = tokenizer.encode(row["answer"])[: 40 + 20 * repeat]
            ids += prompt + answer
            offsets.append(len(ids))
            prompts.append(len(prompt))
    return torch.tensor(ids), torch.tensor(offsets), prompts


@pytest.mark.slice(0, "matrix")
@pytest.mark.timeout(1200)
def test_log_probs_of_a_hundred_problems_are_transformers_own(whole_model: Path, shared_data: Path) -> None:
    ids, offsets, _ = read_problems(whole_model, shared_data, count=100)
    with torch.no_grad():
        packed = [
            token_logprobs(load, ids[first:last], part - first, needs=frozenset({"entropy"}))
            for load in [load_model(str(whole_model))]
            for part in offsets.unfold(0, 11, 10)
            for first, last in [(int(part[0]), int(part[-1]))]
        ]
        own = one_by_one(AutoModelForCausalLM.from_pretrained(whole_model), ids, offsets, temperature=1.0)
    logprobs, entropies = torch.cat([one.logprobs for one in packed]), [one.entropy for one in packed]
    gap = (logprobs - own[0]).abs()
    print(f"{len(ids)} tokens: log-probs differ by {gap.max():.2g} nats at most, {gap.mean():.2g} in the mean")
    assert own[0].min() < -5 and gap.max() < 1e-3 and gap.mean() < 1e-5
    assert (torch.cat([one for one in entropies if one is not None]) - own[1]).abs().max() < 1e-3


def in_float64(folder: Path) -> Any:
    """The model of transformers in float64, also its norms, which it computes in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    for norm in model.modules():
        if type(norm).__name__ == "LlamaRMSNorm":
            epsilon = norm.variance_epsilon
            norm.forward = lambda x, norm=norm, epsilon=epsilon: (
                norm.weight * x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
            )
    return model


@pytest.mark.slice(0, "matrix")
@pytest.mark.timeout(600)
def test_the_gradient_of_an_update_is_that_of_float64(
    whole_model: Path, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = cut_model(whole_model, tmp_path / "cut", layers=3)
    ids, offsets, prompts = read_problems(cut, shared_data, count=4, each=2)
    mask = torch.cat([torch.arange(size) >= prompt for size, prompt in zip(offsets.diff(), prompts, strict=True)])
    rewards = torch.randn(len(prompts), generator=torch.Generator().manual_seed(1))
    advantages = torch.repeat_interleave(rewards, offsets.diff()) * mask
    batch = trained_batch(offsets, ids, mask, torch.arange(len(prompts)) // 2, advantages=advantages)
    worker = policy_worker(
        ModelConfig(path=str(cut)),
        ActorConfig(ppo_mini_batch_size=4, ppo_max_token_len_per_gpu=600, optim=OptimConfig(lr=1e-6)),
        device="cpu",
        temperature=1.0,
        log_prob_max_tokens=600,
        total_steps=1,
        seed=1,
    )
    found: dict[str, torch.Tensor] = {}
    clip = gradients.clip

    def seen(*given: Any, **more: Any) -> Any:
        for name, param in fsdp(worker).model.base.named_parameters():
            assert param.grad is not None
            found[name] = param.grad.clone()
        return clip(*given, **more)

    monkeypatch.setattr(learner, "clip", seen)
    worker.update(batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0]), step=1)
    plain = in_float64(cut)
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        logits = plain(input_ids=ids[None, first:last]).logits[0, :-1]
        scores = logits.log_softmax(-1).gather(1, ids[first + 1 : last, None])[:, 0]
        (-(scores * advantages[first + 1 : last]).sum() / mask.sum()).backward()
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    assert found.keys() == wanted.keys()
    errors = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in found}
    print(f"gradients of {len(errors)} tensors: relative errors up to {max(errors.values()):.2g}")
    assert max(errors.values()) < 1e-4
