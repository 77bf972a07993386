"""An expert's transcripts in the policy's update: what supervised training learns of them, in each optimizer step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.sft import SFTConfig
from agentrl.data.sft import SFTSample
from agentrl.trainer.expert import ExpertStream
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.sft import SupervisedWorker
from tests.workers.conftest import BatchMaker, WorkerMaker, same_weights


def transcripts(make_batch: BatchMaker) -> RaggedBatch:
    made = make_batch(prompts=3, n=1, seed=7)
    return RaggedBatch.unsampled(made.offsets, made.ids, made.mask, made.group, made.trajectory)


def test_the_loss_is_that_of_supervised_training(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path
) -> None:
    """Without advantages nothing else is learnt; the weight scales the gradient."""
    expert, batch = transcripts(make_batch), make_batch()
    batch = batch.with_fields(advantages=torch.zeros(batch.num_tokens), old_logprobs=torch.zeros(batch.num_tokens))
    config = SFTConfig.model_validate({"data": {"train_files": "none"}, "model": {"path": str(tiny_policy)}})
    own = SupervisedWorker(config, device="cpu", total_steps=10).update(expert, step=1)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4), expert_coef=0.5)
    found = worker.update(batch.with_fields(zero_advantage=torch.ones(len(batch)) > 0), step=1, expert=expert)
    assert found["actor/expert_loss"] == pytest.approx(own["sft/loss"], rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(0.5 * own["sft/grad_norm"], rel=1e-4)
    assert found["actor/pg_loss"] == 0


def test_transcripts_are_spread_over_the_optimizer_steps_and_0_is_none(
    make_worker: WorkerMaker, make_batch: BatchMaker
) -> None:
    expert, batch = transcripts(make_batch), make_batch()
    batch = batch.with_fields(old_logprobs=torch.zeros(batch.num_tokens))
    actor = ActorConfig(ppo_mini_batch_size=1, optim=OptimConfig(lr=1e-3))  # four steps, three transcripts
    none, weightless, some = make_worker(actor), make_worker(actor), make_worker(actor, expert_coef=1.0)
    none.update(batch, step=1)
    found = weightless.update(batch, step=1, expert=expert)
    some.update(batch, step=1, expert=expert)
    assert found["actor/expert_loss"] > 0
    assert same_weights(none, weightless)
    assert not same_weights(none, some, 1e-4)


def test_the_metric_is_the_mean_over_the_steps_with_transcripts(
    make_worker: WorkerMaker, make_batch: BatchMaker
) -> None:
    """One transcript, and four optimizer steps at a rate that changes nothing."""
    expert, batch = transcripts(make_batch).select([0]), make_batch()
    batch = batch.with_fields(old_logprobs=torch.zeros(batch.num_tokens))
    four, one = (
        make_worker(ActorConfig(ppo_mini_batch_size=prompts, optim=OptimConfig(lr=1e-12))).update(
            batch, step=1, expert=expert
        )["actor/expert_loss"]
        for prompts in (1, 4)
    )
    assert four == pytest.approx(one, rel=1e-4)


def test_each_pass_takes_every_transcript_once_in_another_order() -> None:
    samples = [SFTSample(np.array([number, 1], np.int32), np.array([False, True])) for number in range(7)]
    stream = ExpertStream(samples, batch_size=3, seed=1)
    taken = [stream.batch(step).ids[::2].tolist() for step in range(1, 8)]
    flat = [number for batch in taken for number in batch]
    passes = [flat[start : start + 7] for start in (0, 7, 14)]
    assert [sorted(one) for one in passes] == [list(range(7))] * 3
    assert passes[0] != passes[1] != passes[2]
    assert ExpertStream(samples, 3, 1).batch(5).ids[::2].tolist() == taken[4], "a resumed run takes the same"
