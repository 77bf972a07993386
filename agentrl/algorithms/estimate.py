"""Rewards, KL and advantages of a step: the one computation that needs all tokens of a step at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.advantages import estimated, group_counts, reads_teacher, zero_advantage_sequences
from agentrl.algorithms.distillation import with_teacher_advantages
from agentrl.algorithms.kl import apply_kl_to_rewards
from agentrl.algorithms.ragged import observed, segment_sum
from agentrl.algorithms.rollout_correction import ages, correct, correction_metrics, tally
from agentrl.errors import TrainingError

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig
    from agentrl.config.sections.distillation import DistillationConfig
    from agentrl.trajectory.batch import RaggedBatch


REWARD_KL = "actor/reward_kl_penalty"
"""Metric: the KL to the reference that was subtracted from the rewards, mean over trajectories."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Inputs of `estimate` in addition to the batch and the algorithm's section."""

    n: int
    """Trajectories requested for each prompt."""
    kl_coef: float | None = None
    """Multiple of the KL to the reference that is subtracted from the rewards; None: the KL is not."""
    version: int = 0
    """Version of the policy before the update."""
    distillation: DistillationConfig | None = None
    """The teachers, if any; the advantages include their terms, too (see `with_teacher_advantages`)."""


def estimate(
    batch: RaggedBatch, config: AlgorithmConfig, settings: Settings
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Compute (columns, metrics): advantages, returns and rewards [T] float32, and the rollout's correction.

    By sequence [N] there are zero_advantage (bool) and observed (int64). The rewards include the column model_rewards
    (see `add_rewards`). Needs old_logprobs where `rollout_correction.proximal` is recomputed, with a `kl_coef`
    ref_logprobs, with teachers their columns, and the columns that the estimator declares (see `estimated`).
    Raises TrainingError when rewards, or the KL in them, are not finite.
    """
    n, kl_coef = settings.n, settings.kl_coef
    batch, corrections, metrics = corrected(batch, config, settings.version)
    if (by_model := batch.model_rewards) is not None:
        batch = batch.with_fields(rewards=add_rewards(batch, by_model))
    check_rewards(batch)
    if kl_coef is not None:
        batch, kl = apply_kl_to_rewards(batch, config.kl_penalty, kl_coef)
        check_rewards(batch)
        metrics |= {REWARD_KL: kl, "actor/reward_kl_penalty_coeff": kl_coef}
    if (greedy := batch.greedy_rewards) is not None:
        metrics["group/groups_without_greedy"] = float(len(batch.group[greedy.isnan()].unique()))
    found = estimated(batch, config, n)
    batch = batch.with_fields(advantages=found.advantages, returns=found.returns)
    metrics |= {f"estimator/{name}": float(value) for name, value in found.metrics.items()}
    if settings.distillation is not None:
        batch, of_teacher = with_teacher_advantages(batch, settings.distillation, mixed=not reads_teacher(config))
        metrics |= of_teacher
    metrics |= {f"group/{name}": float(count) for name, count in group_counts(batch, n).items()}
    if (explained := explained_variance(batch)) is not None:
        metrics["critic/explained_variance"] = explained
    assert batch.advantages is not None and batch.returns is not None
    read = segment_sum(observed(batch.mask, batch.offsets).double(), batch.offsets).long()
    columns = {"advantages": batch.advantages, "returns": batch.returns, "rewards": batch.rewards, **corrections}
    columns |= {"zero_advantage": zero_advantage_sequences(batch), "observed": read}
    return columns, metrics


def corrected(
    batch: RaggedBatch, config: AlgorithmConfig, version: int
) -> tuple[RaggedBatch, dict[str, torch.Tensor], dict[str, float]]:
    """Return (the batch with the proximal policy's old_logprobs, columns [T] that the policy's loss reads, metrics).

    Where the policy's own log-probs are not recomputed, the engine's log-probs replace them in estimators and in the
    reward's KL. The loss itself then corrects, by its own log-probs and each token's staleness. The metrics then come
    from the update.
    """
    correction, staleness = config.rollout_correction, ages(batch.version, version)
    if not correction.needs_pass:
        return batch.with_fields(old_logprobs=batch.rollout_logprobs), {"staleness": staleness}, {}
    assert batch.old_logprobs is not None, "the policy's log-probs come first"
    gap = torch.where(batch.mask, batch.old_logprobs - batch.rollout_logprobs, 0.0)
    found = correct(gap, batch.mask, batch.offsets, correction)
    sums = {name: value.item() for name, value in tally(gap, found, batch.mask, staleness).items()}
    metrics = correction_metrics(sums, correction)
    if batch.mask.any():
        metrics["rollout/logprob_gap_max_abs"] = gap.abs().max().item()
    if not correction.changes_loss:
        return batch, {}, metrics
    weight = found.weight.float()
    columns = {"correction": weight}
    if correction.rollout_is is not None:
        columns["correction_clipped"] = found.clipped.float()
    return batch.with_fields(**columns), columns, metrics


def add_rewards(batch: RaggedBatch, rewards: torch.Tensor) -> torch.Tensor:
    """Add `rewards` [N] on each trajectory's last policy token: the batch's rewards then, [T] float32.

    Sequences of one trajectory have the same number.
    """
    places = batch.mask.nonzero()[:, 0]
    if not len(places):
        return batch.rewards
    rows = batch.sequence_ids()[places]
    owner = batch.trajectory[rows]
    last = torch.full((int(owner.max()) + 1,), -1).scatter_reduce_(0, owner, places, "amax")
    added = torch.zeros(len(last)).index_copy_(0, owner, rewards[rows])
    owners = owner.unique()
    return batch.rewards.index_add(0, last[owners], added[owners])


def explained_variance(batch: RaggedBatch) -> float | None:
    """Compute 1 - var(returns - values) / var(returns) over the policy tokens; None without values, or a variance."""
    if batch.values is None or batch.returns is None:
        return None
    values, returns = batch.values[batch.mask].double(), batch.returns[batch.mask].double()
    spread = float(returns.var()) if len(returns) > 1 else 0.0
    return 1 - float((returns - values).var()) / spread if spread > 0 else None


def check_rewards(batch: RaggedBatch) -> None:
    """Check that rewards are finite in float32. Raises TrainingError that names the first trajectory at fault."""
    bad = (~torch.isfinite(batch.rewards)).nonzero()[:, 0]
    if not len(bad):
        return
    rows = batch.sequence_ids()[bad]
    trajectory, prompt = int(batch.trajectory[rows[0]]), int(batch.group[rows[0]])
    raise TrainingError(
        f"rewards must be finite, and those of {len(batch.trajectory[rows].unique())} trajectories are not; the first "
        f"is trajectory {trajectory} of the step (prompt {prompt}), with {float(batch.rewards[bad[0]])}. Look at its "
        "score, its turn rewards (tools, interactions), algorithm.turn_reward_coef, the reward model's score, and the "
        "coefficient of the KL in the reward"
    )
