"""Advantages of a step: the configured estimator on a batch, and which sequences and groups teach nothing."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.distillation import teacher_logprobs
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import by_role, segment_sum
from agentrl.config.columns import OF_SCORER
from agentrl.config.declaration import declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.errors import ConfigError, TrainingError
from agentrl.system.numbers import finite_numbers, number_of
from agentrl.system.registry import configured
from agentrl.system.user_code import contract_error, user_code

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig
    from agentrl.trajectory.batch import RaggedBatch

BASIC = ("offsets", "rewards", "mask", "group", "trajectory", "turn", "version", "old_logprobs", "rollout_logprobs")
"""Columns that every estimator is given."""
Estimator = Callable[[EstimatorColumns, "AlgorithmConfig"], Advantages]


def compute_advantages(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> RaggedBatch:
    """Add the `Advantages` of `estimated` to the batch."""
    found = estimated(batch, config, n)
    return batch.with_fields(advantages=found.advantages, returns=found.returns)


def estimated(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Advantages:
    """Compute advantages and returns [T] float32 by `config.adv_estimator`, 0 where the policy did not sample.

    Needs old_logprobs and the columns that the estimator declares. n: trajectories requested for each prompt. The
    column score_shift is read by `with_own_scores`. Raises CodeError where a user's estimator fails, or does not return
    one number a token.
    """
    found = _estimated(batch, config, n)
    return found if batch.score_shift is None else with_own_scores(found, batch, config, n)


def with_own_scores(found: Advantages, batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Advantages:
    """Replace the advantages of sequences whose transcript has a score of its own.

    Each gets the advantage that its trajectory would have with this score, where all other trajectories of the prompt
    have theirs. score_shift [N] float64 is the difference. Raises ConfigError for an estimator that does not declare
    `by_reward`.
    """
    if (why := why_no_scores(config)) is not None:
        raise ConfigError(f"a transcript has a score of its own: {why}")
    assert batch.score_shift is not None
    rows, ends = batch.sequence_ids(), torch.full((len(batch),), -1)
    places = batch.mask.nonzero()[:, 0]
    ends.scatter_reduce_(0, rows[places], places, "amax")
    advantages, returns = found.advantages.clone(), found.returns.clone()
    groups = by_role(batch.group, batch.role).tolist()
    seen: Counter[int] = Counter()
    passes: defaultdict[int, list[int]] = defaultdict(list)
    for row in batch.score_shift.nonzero()[:, 0].tolist():  # of each group one at a time
        passes[seen[groups[row]]].append(row)
        seen[groups[row]] += 1
    for chosen in passes.values():
        rewards = batch.rewards.index_add(0, ends[chosen], batch.score_shift[chosen].to(batch.rewards.dtype))
        again = _estimated(batch.with_fields(rewards=rewards), config, n)
        own = torch.isin(rows, torch.tensor(chosen))
        advantages, returns = torch.where(own, again.advantages, advantages), torch.where(own, again.returns, returns)
    return Advantages(advantages, returns, found.metrics)


def why_no_scores(config: AlgorithmConfig) -> str | None:
    """Say why a run takes no score of a single transcript; None: it takes them."""
    if declaration_of(ADVANTAGE_ESTIMATORS.get(config.adv_estimator)).by_reward:
        return None
    return (
        f"algorithm.adv_estimator={config.adv_estimator} gives no advantage by the score of a single transcript. Take "
        "grpo, rloo, opo or maxrl, or score whole sessions"
    )


def _estimated(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Advantages:
    what = f"algorithm.adv_estimator={config.adv_estimator}"
    found = cast(Estimator, ADVANTAGE_ESTIMATORS.get(config.adv_estimator))
    columns = estimator_columns(batch, n, declaration_of(found).columns, what)
    with torch.no_grad(), user_code(what, found):
        results = configured(found, config.adv_options, "algorithm.adv_options")(columns, config)
    is_result = isinstance(results, tuple) and len(results) in (2, 3)
    if not is_result or not all(isinstance(one, Tensor) for one in results[:2]):
        problem = f"expected Advantages(advantages, returns) of two tensors, found {type(results).__name__}"
        raise contract_error(what, found, problem)
    metrics = results[2] if len(results) == 3 else {}
    if not isinstance(metrics, Mapping) or any(number_of(one) is None for one in metrics.values()):
        problem = f"metrics of its Advantages must be a mapping of names to numbers, found {metrics!r:.200}"
        raise contract_error(what, found, problem)
    for name, result in zip(("advantages", "returns"), results[:2], strict=True):
        if result.shape != batch.mask.shape:
            problem = (
                f"expected {name} of shape {list(batch.mask.shape)}, one a token, found {list(result.shape)}. A number "
                "of each sequence becomes one of each token by repeat_interleave(columns.offsets.diff())"
            )
            raise contract_error(what, found, problem)
    advantages, returns = (torch.where(batch.mask, result, 0.0).float() for result in results[:2])
    return Advantages(advantages, returns, finite_numbers(what, metrics))


def estimator_columns(
    batch: RaggedBatch, n: int, declared: Collection[str] = (), asked_by: str = ""
) -> EstimatorColumns:
    """Take the columns of a batch that has old_logprobs; of the additional columns only the `declared` ones.

    With the column `role` each role of a trajectory counts as a trajectory of its own, and is compared with the same
    role of the prompt's other trajectories.
    """
    made = {"numbers": numbers, "teacher_logprobs": teacher_logprobs}
    values = {name: made[name](batch) if name in made else getattr(batch, name) for name in (*BASIC, *declared)}
    if missing := [name for name, found in values.items() if found is None]:
        raise TrainingError(f"{asked_by}: the batch has no column {', '.join(missing)}; it has to be computed before")
    if batch.role is not None:
        values |= {"group": by_role(batch.group, batch.role), "trajectory": by_role(batch.trajectory, batch.role)}
    return EstimatorColumns(asked_by=asked_by, n=n, correction=batch.correction, **values)


def numbers(batch: RaggedBatch) -> list[dict[str, float]]:
    """List by sequence the numbers that its trajectory's scorer gave."""
    given = {name: values.tolist() for name, values in batch.sequences.items() if name.startswith(OF_SCORER)}
    return [
        {name.removeprefix(OF_SCORER): values[row] for name, values in given.items() if not math.isnan(values[row])}
        for row in range(len(batch))
    ]


def reads_teacher(config: AlgorithmConfig) -> bool:
    """Check whether the estimator itself makes something of the teachers' log-probs."""
    return "teacher_logprobs" in declaration_of(ADVANTAGE_ESTIMATORS.get(config.adv_estimator)).columns


def zero_advantage_sequences(batch: RaggedBatch) -> Tensor:
    """Mark the sequences whose advantages are all exactly 0, so that their tokens have no policy gradient: [N] bool."""
    assert batch.advantages is not None, "compute_advantages comes first"
    return segment_sum((batch.advantages != 0).double(), batch.offsets) == 0


def group_counts(batch: RaggedBatch, n: int) -> dict[str, int]:
    """Count groups, groups_of_one, and groups_equal: groups of two or more whose rewards are all the same."""
    groups = Groups.from_columns(estimator_columns(batch, n))
    return {
        "groups": len(groups.size),
        "groups_of_one": int((groups.size == 1).sum()),
        "groups_equal": int(groups.equal(groups.totals).sum()),
    }
