"""Dynamic sampling: which groups of a step's batch were replaced, and the error where it cannot be filled.

With a bound of 0 a step draws one generation batch of prompts after another, until enough groups teach. All of them are
recorded and counted in the step's metrics; only the batch is trained on. With a higher bound each group that leaves is
replaced by the next prompt, and leaves no record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from statistics import mean

from agentrl.config import Config
from agentrl.rollouts.contract import Rollout
from agentrl.rollouts.staleness_scheduler import Batch, PromptStatus, StalenessScheduler
from agentrl.system.metrics import Numbers

ADVICE = (
    "Where most are left out the prompts are too hard or too easy for this policy: take others, raise "
    "actor_rollout_ref.rollout.n or the temperature, or name a metric that tells trajectories apart. Where it only "
    "takes longer, raise max_num_gen_batches (0: no limit) or data.gen_batch_size"
)


def filled(parts: Sequence[Rollout], batch: Batch, first: int) -> tuple[Rollout, Numbers]:
    """Join the generation batches of a step, whose prompts begin with `first`, and leave others than `batch` untrained.

    Returns the rollout with the metrics of the drawing.
    """
    taken = {ordinal - first for ordinal in batch.ordinals}
    kept = []
    for one in parts:
        if one.batch is not None:
            rows = [row for row, group in enumerate(one.batch.group.tolist()) if group in taken]
            one = replace(one, batch=one.batch.select(rows))
        kept.append(one)
    surplus = sum(status is PromptStatus.CANCELLED for status in batch.statuses.values())
    return Rollout.joined(kept), {"refill/gen_batches": float(len(parts)), "refill/groups_surplus": float(surplus)}


def left_out(schedule: StalenessScheduler) -> tuple[int, int]:
    """Count the groups that left since the batch before: (by the rule, as they failed)."""
    equal = sum(status is PromptStatus.FILTERED for _, status in schedule.left)
    return equal, len(schedule.left) - equal


def replaced(schedule: StalenessScheduler) -> Numbers:
    """Make the metrics of the groups that left since the batch before."""
    equal, failed = left_out(schedule)
    return {"refill/groups_equal": float(equal), "refill/groups_failed": float(failed)}


def cannot_be_filled(config: Config, schedule: StalenessScheduler) -> bool:
    """Say whether more groups were replaced than may be, or a batch's worth as they failed, too large a part of all."""
    if schedule.is_exhausted or schedule.settings.draw_size is not None:  # of which failed trajectories are counted
        return schedule.is_exhausted
    _, failed = left_out(schedule)
    allowed = config.actor_rollout_ref.rollout.agent.max_failed_fraction
    return failed >= schedule.settings.batch_size and failed > allowed * (len(schedule.left) + len(schedule.ready))


def rewards_left_out(config: Config, schedule: StalenessScheduler, parts: Sequence[Rollout], first: int) -> str:
    """Write the commonest mean rewards of the groups that the rule left out; `parts` begin with the prompt `first`."""
    coef, left = config.algorithm.turn_reward_coef, dict(schedule.left)
    outlines = (outline for part in parts for outline in part.outlines if not outline.baseline)
    rewards = Counter(
        mean(one.reward(coef) or 0.0 for one in group)
        for number, group in groupby(outlines, attrgetter("group"))
        if left.get(first + number) is PromptStatus.FILTERED
    )
    return ", ".join(f"{count} of mean reward {value:g}" for value, count in rewards.most_common(3))


def shortage(config: Config, schedule: StalenessScheduler, step: int, parts: Sequence[Rollout], first: int) -> str:
    """Write which groups were found where the batch of a step cannot be filled, and how to fix it.

    `parts`: as of `rewards_left_out`.
    """
    keys, (equal, failed) = config.algorithm.filter_groups, left_out(schedule)
    rewards = rewards_left_out(config, schedule, parts, first)
    return (
        f"step {step}: {len(schedule.left)} groups were replaced since the step before, more than "
        f"algorithm.filter_groups.max_num_gen_batches={keys.max_num_gen_batches} or rollout.agent.max_failed_fraction "
        f"allows, and {len(schedule.ready)} of the {schedule.settings.batch_size} that data.train_batch_size asks for "
        f"are there. {equal} are left out by algorithm.filter_groups.rule={keys.rule} "
        f"(metric={keys.metric}{rewards and f'; {rewards}'}), and {failed} as fewer "
        f"than two of their trajectories can be trained on. {ADVICE}"
    )
