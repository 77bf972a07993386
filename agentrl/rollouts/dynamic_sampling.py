"""Batches: how one is filled within a step where rollouts and updates take turns, and the error where it cannot be.

A step draws one generation batch of prompts after another, until enough groups teach; without dynamic sampling the
first one is the batch. All generation batches are recorded and counted in the step's metrics; only the batch is trained
on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from statistics import mean

from agentrl.config import Config
from agentrl.errors import TrainingError
from agentrl.rollouts.contract import Rollout, RolloutRunner, Task, check_failures
from agentrl.rollouts.prompts import Prompts
from agentrl.rollouts.staleness_scheduler import GroupStatus, NotReady, PromptStatus, StalenessScheduler
from agentrl.system.metrics import Numbers

ADVICE = (
    "Where most are left out the prompts are too hard or too easy for this policy: take others, raise "
    "actor_rollout_ref.rollout.n or the temperature, or name a metric that tells trajectories apart. Where it only "
    "takes longer, raise max_num_gen_batches (0: no limit) or data.gen_batch_size"
)


def fill_batch(
    config: Config,
    schedule: StalenessScheduler,
    prompts: Prompts,
    runner: RolloutRunner,
    task: Task,
    *,
    show: bool,
) -> tuple[StalenessScheduler, Rollout, Numbers]:
    """Begin prompts together, and wait for their end, until their groups fill the batch of a step.

    Returns the state after it, the rollout, and the metrics of dynamic sampling. Raises TrainingError when they do not
    after `max_num_gen_batches`, when too many trajectories failed, and for a trajectory without the metric.
    """
    parts, first, most = list[Rollout](), schedule.next_ordinal, config.algorithm.filter_groups.max_num_gen_batches
    refills = schedule.settings.replaces
    while isinstance(batch := schedule.take(), NotReady):
        if refills and len(parts) == most > 0:
            raise TrainingError(shortage(config, schedule, task.step, rewards_left_out(config, schedule, parts, first)))
        begun = range(schedule.next_ordinal, schedule.next_ordinal + schedule.room)
        prompts.draw_to(begun.stop)
        schedule = schedule.admit(len(begun))
        samples, part = [prompts[one] for one in begun], f"_{len(parts):03d}" if parts else task.part
        parts.append(runner.run(replace(task, part=part), samples, begun.start - first, show=show and not parts))
        if refills:  # else the step checks, when they are recorded
            check_failures(config, task.step, [outline for outline in parts[-1].outlines if not outline.baseline])
        # A prompt that came back without trajectories has failed; the check `fates` names it.
        outcomes = dict(zip(begun, parts[-1].outcomes, strict=False))
        for ordinal in begun:
            schedule, _ = schedule.finish(ordinal, outcomes.get(ordinal, GroupStatus.FAILED), None)
    prompts.forget_before(schedule.next_ordinal)
    if not refills:
        return batch.schedule, parts[0], {}
    surplus = sum(status is PromptStatus.CANCELLED for status in batch.statuses.values())
    numbers = {"refill/gen_batches": float(len(parts)), **replaced(schedule), "refill/groups_surplus": float(surplus)}
    taken = {ordinal - first for ordinal in batch.ordinals}
    kept = []
    for one in parts:
        if one.batch is not None:
            rows = [row for row, group in enumerate(one.batch.group.tolist()) if group in taken]
            one = replace(one, batch=one.batch.select(rows))
        kept.append(one)
    return batch.schedule, Rollout.joined(kept), numbers


def left_out(schedule: StalenessScheduler) -> tuple[int, int]:
    """Count the groups that left since the batch before: (by the rule, as they failed)."""
    equal = sum(status is PromptStatus.FILTERED for _, status in schedule.left)
    return equal, len(schedule.left) - equal


def replaced(schedule: StalenessScheduler) -> Numbers:
    """Make the metrics of the groups that left since the batch before."""
    equal, failed = left_out(schedule)
    return {"refill/groups_equal": float(equal), "refill/groups_failed": float(failed)}


def most_failed(config: Config, schedule: StalenessScheduler) -> bool:
    """Say whether a batch's worth of groups was replaced as they failed, too large a part of all."""
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


def shortage(config: Config, schedule: StalenessScheduler, step: int, rewards: str = "") -> str:
    """Write which groups were found where the batch of a step cannot be filled, and how to fix it."""
    keys, (equal, failed) = config.algorithm.filter_groups, left_out(schedule)
    return (
        f"step {step}: {len(schedule.left)} groups were replaced since the step before, more than "
        f"algorithm.filter_groups.max_num_gen_batches={keys.max_num_gen_batches} or rollout.agent.max_failed_fraction "
        f"allows, and {len(schedule.ready)} of the {schedule.settings.batch_size} that data.train_batch_size asks for "
        f"are there. {equal} are left out by algorithm.filter_groups.rule={keys.rule} "
        f"(metric={keys.metric}{rewards and f'; {rewards}'}), and {failed} as fewer "
        f"than two of their trajectories can be trained on. {ADVICE}"
    )
