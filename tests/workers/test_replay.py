"""Experts that the policy chose before the update (R2), which the update goes through again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import TrainingError
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker
from tests.model.families import make_model
from tests.model.test_routing import swap_twins, with_twins
from tests.naming import naming
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp

R2 = {"router_replay": {"mode": "R2"}}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, vocab_size: int) -> Path:
    """A random mixture whose routers find experts 0 and 1 about equally good."""
    path = tmp_path_factory.mktemp("mixture")
    with_twins(make_model("qwen3-moe", vocab_size=vocab_size)).save_pretrained(path)
    return path


def scored(worker: PolicyWorker, batch: RaggedBatch) -> RaggedBatch:
    """The batch with the columns that the pass before the update gives."""
    logprobs, _ = worker.compute_log_probs(batch)
    return batch.with_fields(old_logprobs=logprobs, experts=worker.of_log_probs().values)


def sent(worker: PolicyWorker) -> list[list[torch.Tensor]]:
    """Lists, by layer, which fill with the experts [P, k] of every forward pass from now on."""
    found: list[list[torch.Tensor]] = [[], []]
    for layer, into in enumerate(found):
        experts: Any = fsdp(worker).model.base.get_submodule(f"model.layers.{layer}.mlp.experts")
        experts.register_forward_pre_hook(lambda module, args, into=into: into.append(args[1].clone()))
    return found


def rows(experts: list[torch.Tensor]) -> torch.Tensor:
    """The rows in an order that does not depend on that of the tokens."""
    joined = torch.cat(experts).long()
    return joined[(joined[:, 0] * 100 + joined[:, 1]).argsort()]


def test_the_ratio_is_exactly_1_until_the_weights_change(
    make_worker: WorkerMaker, make_batch: BatchMaker, mixture: Path
) -> None:
    worker = make_worker(ActorConfig.model_validate(R2), ModelConfig(path=str(mixture)))
    batch = scored(worker, make_batch())
    assert batch.experts is not None and batch.experts.dtype == torch.uint8
    assert tuple(batch.experts.shape) == (batch.num_tokens, 2, 2)

    def again(batch: RaggedBatch) -> torch.Tensor:
        return fsdp(worker).log_probs(batch, frozenset()).logprobs

    assert batch.old_logprobs is not None
    assert torch.equal(again(batch), batch.old_logprobs)
    fsdp(worker).log_prob_max_tokens = 70  # other micro-batches: other sums of floats
    assert torch.allclose(again(batch), batch.old_logprobs, rtol=0, atol=1e-5)
    swap_twins(fsdp(worker).model.base)
    own, replayed = ((again(one) - batch.old_logprobs).abs().max() for one in (batch.with_fields(experts=None), batch))
    assert own > 0.05 and replayed < 2e-3
    assert torch.equal(scored(worker, batch).old_logprobs, again(batch.with_fields(experts=None))), "recorded anew"  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", [False, True])
def test_every_pass_of_the_update_goes_through_the_recorded_experts(
    make_worker: WorkerMaker, make_batch: BatchMaker, mixture: Path, recompute: bool
) -> None:
    """Mini-batches, epochs and micro-batches of another cut; after steps so large that routers would choose others."""
    actor = {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "ppo_max_token_len_per_gpu": 50, **R2}
    worker = make_worker(
        ActorConfig.model_validate({**actor, "optim": OptimConfig(lr=0.1)}),
        ModelConfig(path=str(mixture), enable_gradient_checkpointing=recompute),
    )
    batch = scored(worker, make_batch(prompts=5, n=1))  # no beginning is shared, so each token is sent once
    assert batch.experts is not None
    recorded = batch.experts
    found = sent(worker)
    metrics = worker.update(batch, step=1)
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped_updates"] == 0
    passes = 4 if recompute else 2
    for layer, experts in enumerate(found):
        assert torch.equal(rows(experts), rows([recorded[:, layer]] * passes))
    after = scored(worker, batch).experts
    assert after is not None and (after != recorded).float().mean() > 0.1, "the routers themselves choose others now"


def test_without_a_pass_before_the_update_routers_choose(
    make_worker: WorkerMaker, make_batch: BatchMaker, mixture: Path
) -> None:
    """One mini-batch and one epoch: the weights are those of the pass, and so are the experts."""
    model = ModelConfig(path=str(mixture))
    batch = make_batch(prompts=3, n=1)
    metrics = []
    for scores in (False, True):
        worker = make_worker(ActorConfig.model_validate(R2), model)
        metrics.append(worker.update(scored(worker, batch) if scores else batch, step=1))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)


def test_a_strategy_that_tells_no_experts_is_refused(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    plain = "tests.workers.plain_backend:PlainPolicy"
    worker = make_worker(ActorConfig.model_validate({"strategy": plain, **R2}))
    with naming(TrainingError, "router_replay.mode=R2"):
        worker.compute_log_probs(make_batch())
