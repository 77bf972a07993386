"""Rounds: the trajectories of some prompts, from their beginning to their end, for validation and generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from agentrl.rollouts.contract import EndedGroup, PromptTask, Rollout, RolloutRunner, Task
from agentrl.trajectory.sample import Sample

LOOK_EVERY = 0.25
"""Seconds between two looks whether a process has died."""
Hook = Callable[[], Coroutine[object, None, None]]


async def nothing() -> None:
    """Do nothing before or after a round."""


def run_round(
    rollouts: RolloutRunner,
    task: Task,
    samples: Sequence[Sample],
    first: int = 0,
    *,
    show: bool = False,
    before: Hook = nothing,
    after: Hook = nothing,
) -> Rollout:
    """Run, score and record the trajectories of `samples`, whose prompts are numbered from `first`.

    Groups that are under way continue meanwhile. `before` and `after` are awaited on the runner's loop around the
    trajectories: all is one coroutine, so that an embedded engine's order repeats. Raises the errors of
    `RolloutRunner`.
    """
    # Prompts of a training have ordinals from 0 on, and may be under way.
    works = [PromptTask(-1 - number, sample, task, number) for number, sample in enumerate(samples, first)]
    groups: set[asyncio.Task[EndedGroup]] = set()
    on_end: Callable[[], None] | None = None

    def ended() -> None:
        if on_end is not None:
            on_end()

    async def has_ended() -> bool:
        """Wait for all groups; false: a process died that must be replaced before."""
        nonlocal on_end
        try:
            if not groups:
                await before()
                groups.update(asyncio.create_task(rollouts.run_group(one, ignore, ended, None)) for one in works)
            running = {one for one in groups if not one.done()}
            with rollouts.observed(task, len(running) * task.each) as on_end:
                while running:
                    done, running = await asyncio.wait(running, timeout=LOOK_EVERY, return_when=asyncio.FIRST_EXCEPTION)
                    for one in done:
                        one.result()
                    if rollouts.is_broken:
                        return False
            await after()
        except BaseException:
            for one in groups:
                one.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            raise
        return True

    while not rollouts.loop.run(has_ended()):
        rollouts.replace_dead_workers()
    return rollouts.pack(task, [work.ordinal for work in works], None, first, show=show)


def ignore(version: int) -> None:
    """Take no note of the weights that a group begins by."""
