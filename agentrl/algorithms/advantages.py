"""Advantages of a step: the configured estimator on a batch, and which sequences and groups teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.distillation import teacher_logprobs
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import segment_sum
from agentrl.config.declaration import Extra, declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.errors import TrainingError
from agentrl.system.registry import configured

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig
    from agentrl.trajectory.batch import RaggedBatch

Estimator = Callable[[EstimatorColumns, "AlgorithmConfig"], Advantages]


def compute_advantages(
    batch: RaggedBatch, config: AlgorithmConfig, n: int, numbers: Mapping[int, Mapping[str, float]] | None = None
) -> RaggedBatch:
    """Add advantages and returns [T] float32 by `config.adv_estimator`, 0 where the policy did not sample.

    Needs old_logprobs and the columns that the estimator declares. n: trajectories requested for each prompt. numbers:
    by trajectory, its scorer's numbers. Raises TrainingError unless the estimator returns one number a token.
    """
    found = cast(Estimator, ADVANTAGE_ESTIMATORS.get(config.adv_estimator))
    declared = declaration_of(found).columns
    columns = estimator_columns(batch, n, declared)
    if "numbers" in declared:
        by_sequence = [(numbers or {}).get(trajectory, {}) for trajectory in batch.trajectory.tolist()]
        columns = replace(columns, numbers=by_sequence)
    with torch.no_grad():
        results = configured(found, config.adv_options, "algorithm.adv_options")(columns, config)
    for name, result in zip(("advantages", "returns"), results, strict=True):
        if result.shape != batch.mask.shape:
            raise TrainingError(
                f"algorithm.adv_estimator={config.adv_estimator}: expected {name} of shape {list(batch.mask.shape)}, "
                f"one a token, found {list(result.shape)}"
            )
    advantages, returns = (torch.where(batch.mask, result, 0.0).float() for result in results)
    return replace(batch, advantages=advantages, returns=returns)


def estimator_columns(batch: RaggedBatch, n: int, declared: Collection[Extra] = ()) -> EstimatorColumns:
    """Take the columns of a batch that has old_logprobs; of the optional columns only the `declared` ones."""
    assert batch.old_logprobs is not None, "the policy's log-probs come first"

    def optional(name: Extra) -> Tensor | None:
        if name not in declared:
            return None
        values: Tensor | None = getattr(batch, name)
        assert values is not None, f"{name} is declared, and not computed"
        return values

    return EstimatorColumns(
        rewards=batch.rewards,
        mask=batch.mask,
        offsets=batch.offsets,
        group=batch.group,
        trajectory=batch.trajectory,
        turn=batch.turn,
        version=batch.version,
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        n=n,
        ref_logprobs=optional("ref_logprobs"),
        values=optional("values"),
        entropy=optional("entropy"),
        squared_probs=optional("squared_probs"),
        state=optional("state"),
        greedy_rewards=optional("greedy_rewards"),
        correction=batch.correction,
        teacher_logprobs=teacher_logprobs(batch) if "teacher_logprobs" in declared else None,
    )


def reads_teacher(config: AlgorithmConfig) -> bool:
    """Check whether the estimator itself makes something of the teachers' log-probs."""
    return "teacher_logprobs" in declaration_of(ADVANTAGE_ESTIMATORS.get(config.adv_estimator)).columns


def zero_advantage_sequences(batch: RaggedBatch) -> list[int]:
    """Indices of the sequences whose advantages are all exactly 0, so that their tokens have no policy gradient."""
    assert batch.advantages is not None, "compute_advantages comes first"
    nonzero = segment_sum((batch.advantages != 0).double(), batch.offsets)
    return torch.nonzero(nonzero == 0).flatten().tolist()


def group_counts(batch: RaggedBatch, n: int) -> dict[str, int]:
    """Count groups, groups_of_one, and groups_equal: groups of two or more whose rewards are all the same."""
    groups = Groups.from_columns(estimator_columns(batch, n))
    return {
        "groups": len(groups.size),
        "groups_of_one": int((groups.size == 1).sum()),
        "groups_equal": int(groups.equal(groups.totals).sum()),
    }
