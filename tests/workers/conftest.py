"""A real tiny Qwen3 with its tokenizer, and batches of made-up tokens for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker
from agentrl.workers.fsdp import FSDPPolicy
from tests.trained import trained_batch
from tests.workers.made import policy_worker

SHAPE = TinyShape(vocab=320, hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Qwen3 (hidden 32, 2 layers, tied embeddings) with its tokenizer."""
    return make_tiny_policy(tmp_path_factory.mktemp("tiny-policy"), seed=0, shape=SHAPE)


@pytest.fixture(scope="session")
def vocab_size(tiny_policy: Path) -> int:
    return int(json.loads((tiny_policy / "config.json").read_text())["vocab_size"])


BatchMaker = Callable[..., RaggedBatch]


@pytest.fixture(scope="session")
def make_batch(vocab_size: int) -> BatchMaker:
    """make_batch(prompts, n, seed): n sequences a prompt: prompt, policy tokens, a tool's tokens, policy tokens."""

    def make(prompts: int = 4, n: int = 3, seed: int = 0) -> RaggedBatch:
        generator = torch.Generator().manual_seed(seed)

        def tokens(low: int, high: int) -> torch.Tensor:
            length = int(torch.randint(low, high, (), generator=generator))
            return torch.randint(3, vocab_size, (length,), generator=generator)

        ids, mask, turns, group, offsets = [], [], [], [], [0]
        for prompt in range(prompts):
            beginning = tokens(10, 14)
            for _ in range(n):
                parts = [beginning, tokens(3, 9), tokens(2, 5), tokens(3, 9)]
                ids += parts
                mask += [torch.full_like(part, place in (1, 3), dtype=torch.bool) for place, part in enumerate(parts)]
                turns += [
                    torch.full_like(part, place - 1 if place in (1, 3) else -1) for place, part in enumerate(parts)
                ]
                group.append(prompt)
                offsets.append(offsets[-1] + sum(len(part) for part in parts))
        flat_mask = torch.cat(mask)
        by_sequence = torch.randn(len(group), generator=generator)
        advantages = torch.repeat_interleave(by_sequence, torch.tensor(offsets).diff()) * flat_mask
        return trained_batch(
            torch.tensor(offsets),
            torch.cat(ids),
            flat_mask,
            torch.tensor(group),
            turn=torch.cat(turns).int(),
            advantages=advantages,
        )

    return make


WorkerMaker = Callable[..., PolicyWorker]


@pytest.fixture
def make_worker(tiny_policy: Path) -> WorkerMaker:
    """make_worker(actor=..., model=..., **arguments): a PolicyWorker of the tiny policy on the CPU."""

    def make(actor: ActorConfig | None = None, model: ModelConfig | None = None, **arguments: object) -> PolicyWorker:
        defaults = {"temperature": 1.0, "log_prob_max_tokens": 4096, "total_steps": 10, "seed": 1}
        return policy_worker(
            model or ModelConfig(path=str(tiny_policy)),
            actor or ActorConfig(optim=OptimConfig(lr=1e-2)),
            device="cpu",
            **(defaults | arguments),  # type: ignore[arg-type]
        )

    return make


def fsdp(worker: PolicyWorker) -> FSDPPolicy:
    """The worker's backend, where it is ours."""
    assert isinstance(worker.backend, FSDPPolicy)
    return worker.backend


def weights(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    """A copy of every weight."""
    return {name: tensor.clone() for name, tensor in fsdp(worker).named_tensors()}


def same_weights(left: PolicyWorker, right: PolicyWorker, tolerance: float = 0.0) -> bool:
    """Whether all weights agree to `tolerance`; exactly when it is 0."""
    return all(
        torch.allclose(a, b, rtol=0.0, atol=tolerance) if tolerance else torch.equal(a, b)
        for (_, a), (_, b) in zip(fsdp(left).named_tensors(), fsdp(right).named_tensors(), strict=True)
    )
