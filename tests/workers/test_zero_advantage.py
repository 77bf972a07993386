"""An update that leaves out sequences without advantage moves the weights as one that goes over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from agentrl.algorithms.aggregate import Scored
from agentrl.algorithms.ragged import observed
from agentrl.algorithms.terms import ObservationNLL
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import LossAggMode
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import TrainingError
from agentrl.model.scores import TokenScores
from agentrl.trajectory.batch import RaggedBatch
from tests.naming import naming
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp, same_weights
from tests.workers.made import policy_worker

EQUAL_PROMPTS = [0, 1, 2, 4]
"""Their rewards are all equal. Of each epoch's three mini-batches of two prompts some have no other prompt."""
COUNTED = {"train/filtered_fraction", "perf/update_tokens", "train/policy_tokens", "train/loss_weight"}
"""Metrics that tell what was computed."""
ADAMW = OptimConfig(lr=1e-3, weight_decay=0.1)


@pytest.fixture
def batch(make_batch: BatchMaker) -> RaggedBatch:
    batch = make_batch(prompts=6, n=2)
    assert batch.advantages is not None
    nothing = torch.isin(batch.group, torch.tensor(EQUAL_PROMPTS))
    nothing[-1] = True  # one at the mean of its group
    batch.advantages[nothing[batch.sequence_ids()]] = 0.0
    return batch


def rows_of(batch: RaggedBatch) -> list[int]:
    return [row for row, group in enumerate(batch.group.tolist()) if group in EQUAL_PROMPTS] + [len(batch) - 1]


def marked(batch: RaggedBatch, rows: Sequence[int]) -> RaggedBatch:
    """The batch with `rows` as its sequences without advantage."""
    return batch.with_fields(zero_advantage=torch.isin(torch.arange(len(batch)), torch.tensor(rows)))


def updates(worker: Any, batch: RaggedBatch, zero_advantage: list[int]) -> list[dict[str, float]]:
    """Metrics of two updates of three mini-batches and two epochs: weights, moments and clipping have come into it."""
    found = []
    for step in (1, 2):
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        assert batch.old_logprobs is not None
        batch = batch.with_fields(ref_logprobs=batch.old_logprobs - 0.1)
        found.append(worker.update(marked(batch, zero_advantage), step=step))
    return found


def test_a_pass_without_sequences_leaves_no_columns(make_worker: WorkerMaker, batch: RaggedBatch) -> None:
    """A mini-batch of sequences without advantage has one, as other ranks may have work."""
    worker = make_worker(ActorConfig(ppo_mini_batch_size=2, optim=ADAMW, shuffle=False))
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    worker.update(marked(batch, list(range(len(batch) - 1))), step=1, by_token=True)
    found = worker.of_update()
    assert found.rows.tolist() == [len(batch) - 1] and len(found.values) == int(batch.lengths[-1])


@pytest.mark.parametrize(
    ("loss", "mode"), [*(("vanilla", mode) for mode in get_args(LossAggMode)), ("gspo", "seq-mean-token-mean")]
)
def test_the_objective_is_that_of_the_whole_batch(
    make_worker: WorkerMaker, batch: RaggedBatch, loss: str, mode: str
) -> None:
    config = ActorConfig(
        ppo_mini_batch_size=2, ppo_epochs=2, loss_agg_mode=mode, policy_loss={"loss_mode": loss}, optim=ADAMW
    )
    (some, saving), (every, whole) = (
        (worker := make_worker(config, max_response_length=30), updates(worker, batch, rows))
        for rows in (rows_of(batch), [])
    )
    assert same_weights(some, every, 1e-5)  # AdamW's step of 1e-3 shows the rounding of a gradient of almost 0
    for one, two in zip(saving, whole, strict=True):
        assert (one.pop("train/filtered_fraction"), two.pop("train/filtered_fraction")) == (9 / 12, 0.0)
        assert one.pop("perf/update_tokens") < 0.5 * two.pop("perf/update_tokens")
        assert one.pop("train/policy_tokens") < 0.5 * two.pop("train/policy_tokens")
        assert one.pop("train/loss_weight", 0.0) <= two.pop("train/loss_weight", 0.0) == pytest.approx(1, abs=1e-6) or (
            "mean" not in mode or "sum" in mode
        )
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
        assert one["actor/grad_norm"] > 0


@pytest.mark.parametrize("term", [{"use_kl_loss": True, "kl_loss_coef": 0.1}, {"entropy_coeff": 0.01}])
def test_kl_loss_and_entropy_bonus_are_taken_over_all_sequences(
    make_worker: WorkerMaker, batch: RaggedBatch, term: dict[str, Any]
) -> None:
    config = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2, optim=ADAMW, **term)
    (some, saving), (every, whole) = (
        (worker := make_worker(config), updates(worker, batch, rows)) for rows in (rows_of(batch), [])
    )
    assert same_weights(some, every)
    assert saving == whole
    assert {line["train/filtered_fraction"] for line in saving} == {0.0}


def test_successes_are_imitated_also_where_they_have_no_advantage(make_worker: WorkerMaker, batch: RaggedBatch) -> None:
    """The loss is the mean over their policy tokens in each mini-batch; what else has no advantage is left out."""
    config = ActorConfig(ppo_mini_batch_size=6, success_nll_coef=0.1, optim=ADAMW)
    successes = [0, 5, len(batch) - 1]
    batch = batch.with_fields(success=torch.isin(torch.arange(len(batch)), torch.tensor(successes)))
    some, every = make_worker(config), make_worker(config)
    batch = batch.with_fields(old_logprobs=some.compute_log_probs(batch)[0])
    saving = some.update(marked(batch, rows_of(batch)), step=1)
    whole = every.update(batch, step=1)
    assert batch.success is not None and batch.old_logprobs is not None
    imitated = batch.mask & batch.success[batch.sequence_ids()]
    expected = -float(batch.old_logprobs[imitated].mean())
    assert saving["actor/success_nll"] == pytest.approx(expected, rel=1e-5)
    assert same_weights(some, every, 1e-5)
    assert saving["train/filtered_fraction"] == (len(set(rows_of(batch)) - set(successes))) / len(batch)
    assert whole["train/filtered_fraction"] == 0.0
    plain = make_worker(ActorConfig(ppo_mini_batch_size=6, optim=ADAMW))
    plain.update(batch, step=1)
    assert not same_weights(plain, every, 1e-5)


def test_observations_are_learnt_from_all_sequences(make_worker: WorkerMaker, batch: RaggedBatch) -> None:
    """The loss is the mean over what was read after a sequence's first policy token, whatever its advantage; with a
    coefficient of 0 it is as if it were not there."""
    read = observed(batch.mask, batch.offsets)
    counts = [int(read[start:end].sum()) for start, end in batch.offsets.unfold(0, 2, 1).tolist()]
    assert sum(counts) > 10
    found = {}
    for coef in (0.0, 0.5):
        config = ActorConfig(ppo_mini_batch_size=6, observation_nll_coef=coef, grad_clip=1e9, optim=ADAMW)
        worker = make_worker(config)
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        whole = batch.with_fields(mask=batch.mask | read)
        every = fsdp(worker).log_probs(whole, frozenset()).logprobs
        metrics = worker.update(marked(batch, rows_of(batch)).with_fields(observed=torch.tensor(counts)), step=1)
        found[coef] = metrics, -float(every[read].mean())
    without, (metrics, expected) = found[0.0][0], found[0.5]
    assert metrics["actor/observation_nll"] == pytest.approx(expected, rel=1e-5)
    assert metrics["train/filtered_fraction"] == 0.0 < without["train/filtered_fraction"]
    assert metrics["actor/pg_loss"] == pytest.approx(without["actor/pg_loss"], abs=1e-6)
    assert metrics["train/policy_tokens"] > 0 and "actor/observation_nll" not in without
    assert metrics["actor/grad_norm"] > 2 * without["actor/grad_norm"]


def test_a_backend_that_gives_no_log_probs_of_observations_is_told(batch: RaggedBatch) -> None:
    logprobs = torch.where(batch.mask, -1.0, 0.0)
    with naming(TrainingError, "observation_nll_coef:", "log-probs"):
        ObservationNLL(0.5).share(Scored(batch, TokenScores(logprobs), logprobs), 1)


def test_a_batch_without_any_advantage_is_a_step_of_gradient_zero(make_worker: WorkerMaker, batch: RaggedBatch) -> None:
    """Momentum and weight decay go on, as they would with every sequence computed."""
    config = ActorConfig(ppo_mini_batch_size=6, optim=ADAMW)
    some, every = make_worker(config), make_worker(config)
    for worker in (some, every):
        worker.update(batch, step=1)
    before = make_worker(config)
    before.update(batch, step=1)
    batch = batch.with_fields(advantages=torch.zeros(batch.num_tokens))
    metrics = some.update(marked(batch, range(len(batch))), step=2)
    expected = every.update(batch, step=2)
    assert same_weights(some, every)
    assert not same_weights(some, before, 1e-5)
    assert metrics["actor/grad_norm"] == metrics["actor/pg_loss"] == metrics["perf/update_tokens"] == 0.0
    assert metrics["train/filtered_fraction"] == 1.0
    assert "actor/ppo_kl" not in metrics and "actor/clip_frac" not in metrics, "there is no token to take it over"
    assert {name: value for name, value in expected.items() if name not in COUNTED} == {
        name: value for name, value in metrics.items() if name not in COUNTED
    }


def test_images_of_sequences_that_are_left_out_change_nothing(tmp_path: Path) -> None:
    """The vision tower takes its step, too: of the two sequences one has an image, and no advantage."""
    from agentrl.chat import Chat
    from tests.vision.sharded import images_for_one
    from tests.vision.tiny import make_tiny_vision_policy

    path = str(make_tiny_vision_policy(tmp_path / "vision"))
    batch = images_for_one(Chat.from_pretrained(path))
    actor = ActorConfig(ppo_mini_batch_size=2, optim=ADAMW)
    some, every = (
        policy_worker(
            ModelConfig(path=path), actor, device="cpu", temperature=1.0, log_prob_max_tokens=64, total_steps=2, seed=1
        )
        for _ in range(2)
    )
    assert batch.advantages is not None
    for worker in (some, every):
        worker.update(batch, step=1)
    batch = batch.with_fields(advantages=torch.where(batch.sequence_ids() == 0, 0.0, batch.advantages))
    some.update(marked(batch, [0]), step=2)
    every.update(batch, step=2)
    assert same_weights(some, every, 1e-5)
