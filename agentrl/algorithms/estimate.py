"""Rewards, KL and advantages of a step: the one computation that needs all tokens of a step at once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.advantages import compute_advantages, group_counts, reads_teacher, zero_advantage_sequences
from agentrl.algorithms.distillation import with_teacher_advantages
from agentrl.algorithms.kl import apply_kl_to_rewards
from agentrl.algorithms.ragged import observed, segment_sum
from agentrl.algorithms.rollout_correction import ages, correct, correction_metrics, tally
from agentrl.errors import TrainingError

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig
    from agentrl.config.sections.distillation import DistillationConfig
    from agentrl.trajectory.batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class Estimate:
    """Result of `estimate` besides the per-token columns."""

    metrics: dict[str, float]
    zero_advantage: list[int]
    """Indices of sequences without advantage; see `zero_advantage_sequences`."""
    kl: float
    """KL to the reference that was subtracted from the rewards, mean over sequences; 0 without a KL penalty."""
    trajectory: list[int]
    """The trajectory of each sequence."""
    observed: list[int]
    """Tokens of each sequence that the policy read after its first one; see `observed`."""


def estimate(
    batch: RaggedBatch,
    config: AlgorithmConfig,
    n: int,
    kl_coef: float | None,
    further_rewards: Mapping[int, float] | None = None,
    greedy_rewards: Mapping[int, float] | None = None,
    numbers: Mapping[int, Mapping[str, float]] | None = None,
    successes: Collection[int] | None = None,
    version: int = 0,
    distillation: DistillationConfig | None = None,
) -> tuple[dict[str, torch.Tensor], Estimate]:
    """Compute the columns advantages, returns and rewards [T] float32, and the columns of the rollout's correction.

    The rewards include `further_rewards` (see `add_rewards`); with a `kl_coef`, that multiple of the KL to the
    reference is subtracted. n: trajectories requested for each prompt. For an estimator that declares them:
    greedy_rewards, the reward of each prompt's greedy trajectory, and numbers, the further numbers of each trajectory's
    scorer. With `successes`, a set of trajectories, there is the column success, too: 1 on their tokens, 0 on others.
    version: of the policy before the update. distillation: the teachers, if any; the advantages include their terms,
    too (see `with_teacher_advantages`). Needs old_logprobs where `rollout_correction.proximal` is recomputed, with a
    `kl_coef` ref_logprobs, with teachers their columns, and the columns that the estimator declares (see
    `compute_advantages`). Raises TrainingError when rewards, or the KL in them, are not finite.
    """
    batch, corrections, metrics = corrected(batch, config, version)
    if further_rewards is not None:
        batch = replace(batch, rewards=add_rewards(batch, further_rewards))
    check_rewards(batch)
    kl = 0.0
    if kl_coef is not None:
        batch, kl = apply_kl_to_rewards(batch, config.kl_penalty, kl_coef)
        check_rewards(batch)
        metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
    if greedy_rewards is not None:
        prompts = batch.group.tolist()
        batch = replace(batch, greedy_rewards=torch.tensor([greedy_rewards.get(one, math.nan) for one in prompts]))
        metrics["group/groups_without_greedy"] = float(len(set(prompts) - greedy_rewards.keys()))
    batch = compute_advantages(batch, config, n, numbers)
    if distillation is not None:
        batch, of_teacher = with_teacher_advantages(batch, distillation, mixed=not reads_teacher(config))
        metrics |= of_teacher
    metrics |= {f"group/{name}": float(count) for name, count in group_counts(batch, n).items()}
    assert batch.advantages is not None and batch.returns is not None
    columns = {"advantages": batch.advantages, "returns": batch.returns, "rewards": batch.rewards}
    columns |= corrections
    if (explained := explained_variance(batch)) is not None:
        metrics["critic/explained_variance"] = explained
    trajectories = batch.trajectory.tolist()
    if successes is not None:
        succeeds = torch.tensor([float(one in successes) for one in trajectories])
        columns["success"] = succeeds[batch.sequence_ids()] if len(batch) else torch.zeros(0)
    read = segment_sum(observed(batch.mask, batch.offsets).double(), batch.offsets).long().tolist()
    return columns, Estimate(metrics, zero_advantage_sequences(batch), kl, trajectories, read)


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
        return replace(batch, old_logprobs=batch.rollout_logprobs), {"staleness": staleness}, {}
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


def add_rewards(batch: RaggedBatch, rewards: Mapping[int, float]) -> torch.Tensor:
    """Add `rewards`, by trajectory, on each trajectory's last policy token: the batch's rewards then, [T] float32."""
    places = batch.mask.nonzero()[:, 0]
    if not len(places):
        return batch.rewards
    owner = batch.trajectory[batch.sequence_ids()[places]]
    last = torch.full((int(owner.max()) + 1,), -1).scatter_reduce_(0, owner, places, "amax")
    owners = [trajectory for trajectory in owner.unique().tolist() if trajectory in rewards]
    added = torch.tensor([rewards[trajectory] for trajectory in owners])
    return batch.rewards.index_add(0, last[owners], added)


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
