"""The source that goes on drawing prompts until a step's batch is full of groups that teach (dynamic sampling).

A step draws one generation batch of prompts after another. A group of which fewer than two trajectories can be trained
on, or that does not teach by `algorithm.filter_groups.rule` (`agentrl.algorithms.filtering`), is left out; of the
others the first ones drawn are the step's batch, and what is left over is dropped. All that was drawn is recorded and
counted in the step's metrics; only the batch is trained on.

What it adds to a step's metrics:

| name | what it is |
|---|---|
| `refill/gen_batches` | generation batches that the step drew |
| `refill/groups_equal` | prompts that were left out by the rule, as their trajectories do not differ, say |
| `refill/groups_failed` | prompts that were left out, as fewer than two of their trajectories can be compared |
| `refill/groups_surplus` | groups that would teach, and for which the batch had no place |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import attrgetter
from statistics import mean

from agentrl.algorithms.filtering import load_filter
from agentrl.config import Config
from agentrl.config.sections.algorithm import FilterGroupsConfig
from agentrl.data.loader import Loader
from agentrl.errors import TrainingError
from agentrl.rollouts.contract import Rollout, Rollouts, check_failures, training
from agentrl.rollouts.flow import Outcome
from agentrl.rollouts.groups import outcome_of
from agentrl.rollouts.source import TakingTurns
from agentrl.system.metrics import Metrics, Numbers
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
        self._teaches = load_filter(config.algorithm)

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
            for group, outlines in groupby(sampled, attrgetter("group")):
                its = list(outlines)
                drawn.outcomes[group] = outcome = outcome_of(its, self._teaches)
                if outcome is Outcome.FILTERED:
                    drawn.rewards[mean(one.reward(coef) or 0.0 for one in its)] += 1
            prompts += len(samples)
        self._numbers = {
            "gen_batches": float(len(parts)),
            "groups_equal": float(drawn.filtered),
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
    """Outcomes of the prompts that a step has drawn, in the order in which they were drawn."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    rewards: Counter[float] = field(default_factory=Counter)
    """Mean rewards of the groups that the rule leaves out."""

    @property
    def teaching(self) -> list[int]:
        """Groups that can be trained on."""
        return [group for group, outcome in self.outcomes.items() if outcome is Outcome.SCORED]

    @property
    def filtered(self) -> int:
        """Groups that the rule leaves out."""
        return sum(outcome is Outcome.FILTERED for outcome in self.outcomes.values())

    @property
    def failed(self) -> int:
        """Groups of which fewer than two trajectories can be compared."""
        return len(self.outcomes) - len(self.teaching) - self.filtered

    def shortage(self, size: int, prompts: int, keys: FilterGroupsConfig) -> str:
        """Write what was found where the batch of `size` groups cannot be filled, and what to do."""
        common = ", ".join(f"{count} of mean reward {value:g}" for value, count in self.rewards.most_common(3))
        return (
            f"{prompts} prompts were drawn (algorithm.filter_groups.max_num_gen_batches={keys.max_num_gen_batches}), "
            f"and {len(self.teaching)} of the {size} groups that data.train_batch_size asks for teach by "
            f"algorithm.filter_groups.rule={keys.rule} (metric={keys.metric}). It leaves out {self.filtered} others"
            f"{f' ({common})' if common else ''}, and {self.failed} are left out as fewer than two of their "
            f"trajectories can be trained on. {ADVICE}"
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
