"""The source that goes on drawing prompts until a step's batch is full of groups that teach (dynamic sampling).

A step draws one generation batch of prompts after another. A group of which fewer than two trajectories can be trained
on, or whose trajectories are all equal in `algorithm.filter_groups.metric`, is left out; of the others the first ones
drawn are the step's batch, and what is left over is dropped. All that was drawn is recorded and counted in the step's
metrics; only the batch is trained on.

What it adds to a step's metrics:

| name | what it is |
|---|---|
| `refill/gen_batches` | generation batches that the step drew |
| `refill/groups_equal` | prompts that were left out, as their trajectories do not differ |
| `refill/groups_failed` | prompts that were left out, as fewer than two of their trajectories can be compared |
| `refill/groups_surplus` | groups that would teach, and for which the batch had no place |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from agentrl.algorithms.groups import all_equal
from agentrl.config import Config
from agentrl.config.sections.algorithm import FilterGroupsConfig
from agentrl.data.loader import Loader
from agentrl.errors import TrainingError
from agentrl.rollouts.contract import Rollout, Rollouts, check_failures, training
from agentrl.rollouts.source import TakingTurns
from agentrl.system.metrics import Metrics, Numbers
from agentrl.trajectory import Outline
from agentrl.trajectory.batch import Sequences

ADVICE = (
    "Where most are equal the prompts are too hard or too easy for this policy: take others, raise "
    "actor_rollout_ref.rollout.n or the temperature, or name a metric that tells trajectories apart. Where it only "
    "takes longer, raise max_num_gen_batches (0: no limit) or data.gen_batch_size"
)


class Refilling(TakingTurns):
    """`TakingTurns` whose batches hold only groups that teach; the loader gives generation batches."""

    def __init__(self, config: Config, loader: Loader, rollouts: Rollouts) -> None:
        super().__init__(config, loader, rollouts)
        self._numbers: Numbers = {}

    def next_batch(self, step: int, *, show: bool = False) -> Rollout:
        """Draw and run prompts until the batch is full.

        Raises TrainingError when it is not after `max_num_gen_batches`, when too many trajectories failed, and for a
        trajectory without the metric.
        """
        task, keys, drawn = training(self.config, step), self.config.algorithm.filter_groups, Drawn()
        size, coef = self.config.data.train_batch_size, self.config.algorithm.turn_reward_coef
        parts: list[Rollout] = []
        prompts = 0
        while len(drawn.teaching) < size:
            if len(parts) == keys.max_num_gen_batches > 0:
                raise TrainingError(f"step {step}: {drawn.shortage(size, prompts, keys)}")
            samples = next(self.loader)
            part = replace(task, part=f"_{len(parts):03d}") if parts else task
            parts.append(self.rollouts.run(part, samples, prompts, show=show and not parts))
            sampled = [outline for outline in parts[-1].outlines if not outline.baseline]
            check_failures(self.config, step, sampled)
            drawn.add(sampled, keys.metric, coef)
            prompts += len(samples)
        self._numbers = {
            "gen_batches": float(len(parts)),
            "groups_equal": float(sum(drawn.equal.values())),
            "groups_failed": float(drawn.failed),
            "groups_surplus": float(len(drawn.teaching) - size),
        }
        return joined(parts, set(drawn.teaching[:size]))

    def metrics(self) -> Metrics:
        """See `TrajectorySource`."""
        metrics = super().metrics()
        metrics.add(self._numbers, "refill/")
        return metrics


@dataclass(slots=True)
class Drawn:
    """Fates of the prompts that a step has drawn."""

    teaching: list[int] = field(default_factory=list)
    """Groups whose trajectories differ, in the order in which they were drawn."""
    equal: Counter[float] = field(default_factory=Counter)
    """Groups whose trajectories do not, by the value that they share."""
    failed: int = 0
    """Groups of which fewer than two trajectories can be compared."""

    def add(self, outlines: Iterable[Outline], metric: str, turn_reward_coef: float) -> None:
        """Judge the groups of trajectories, all of a group's at once."""
        groups: dict[int, list[float]] = {}
        for outline in outlines:
            found = groups.setdefault(outline.group, [])
            value = value_of(outline, metric, turn_reward_coef)
            if value is not None:
                found.append(value)
        for group, values in groups.items():
            if len(values) < 2:
                self.failed += 1
            elif all_equal(values):
                self.equal[values[0]] += 1
            else:
                self.teaching.append(group)

    def shortage(self, size: int, prompts: int, keys: FilterGroupsConfig) -> str:
        """Write what was found where the batch of `size` groups cannot be filled, and what to do."""
        common = ", ".join(f"{count} by {value:g} each" for value, count in self.equal.most_common(3))
        return (
            f"{prompts} prompts were drawn (algorithm.filter_groups.max_num_gen_batches={keys.max_num_gen_batches}), "
            f"and {len(self.teaching)} of the {size} groups that data.train_batch_size asks for differ in "
            f"algorithm.filter_groups.metric={keys.metric}. Left out are {sum(self.equal.values())} groups whose "
            f"trajectories are equal{f' ({common})' if common else ''}, and {self.failed} of which fewer than two can "
            f"be compared. {ADVICE}"
        )


def value_of(outline: Outline, metric: str, turn_reward_coef: float) -> float | None:
    """Return the number by which a trajectory is compared; None where it is not trained on.

    Raises TrainingError when its scorer gave no such number.
    """
    reward = outline.reward(turn_reward_coef)
    if reward is None or metric == "reward":
        return reward
    if metric in outline.score_extra:
        return outline.score_extra[metric]
    if metric in ("score", "acc"):
        return outline.score
    raise TrainingError(
        f"algorithm.filter_groups.metric={metric}: the scorer of data_source {outline.data_source!r} gave no number of "
        f"that name, found {', '.join(sorted({'reward', 'score', *outline.score_extra}))}"
    )


def joined(parts: Sequence[Rollout], groups: set[int]) -> Rollout:
    """Join the rollouts of a step, each after the other; the batch holds the sequences of `groups` alone."""
    batches = [_of_groups(part.batch, groups) for part in parts if part.batch is not None]
    read = [part.conversations for part in parts if part.conversations is not None]
    return Rollout(
        list(chain.from_iterable(part.outlines for part in parts)),
        batches[0].joined(batches[1:]),
        parts[0].shown,
        read[0].joined(read[1:]) if read else None,
        list(chain.from_iterable(part.files for part in parts)),
    )


def _of_groups(batch: Sequences, groups: set[int]) -> Sequences:
    return batch.select([row for row, group in enumerate(batch.group.tolist()) if group in groups])
