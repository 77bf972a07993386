"""Groups that a rollout worker under Ray runs concurrently, and their events for the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition

from agentrl.rollouts.contract import EndedGroup, Log, PromptTask
from agentrl.rollouts.local import LocalRollouts
from agentrl.runtime.ray.rank import Failure
from agentrl.system.call_journal import Entry
from agentrl.system.cancellation import leaked_cancellation_fails
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """A trajectory of a group has ended."""


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """Event of the group asked for by `key`."""

    key: int
    what: int | Entry | TrajectoryEnded | EndedGroup | Failure
    """A number: its first trajectory began, by weights no older than this version. An entry of its `Log`: a trajectory
    was answered something, or is about to ask. A failure: an error ended the group."""
    trajectories: list[Trajectory] | None = None
    """Trajectories of a group that has ended; None where the journal's record has them."""


class WorkerGroups:
    """The groups of one worker. Methods are called from any thread; groups run on the loop of `rollouts`."""

    def __init__(self, rollouts: LocalRollouts) -> None:
        self._rollouts = rollouts
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._events: list[GroupEvent] = []
        self._some = Condition()
        self._ends = 0
        self._watching: asyncio.Task[None] | None = None
        """Warns which events groups wait for, while there are some."""
        self._idle = 0.0
        """Seconds of an idle engine that were reported."""

    def begin(self, key: int, work: PromptTask, entries: Sequence[Entry] | None) -> None:
        """Begin a group; `key` names it in its events. `entries`: of its `Log`; None: it has no log."""
        self._rollouts.loop.call_soon(partial(self._begin, key, work, entries))

    def events(self, seconds: float) -> tuple[list[GroupEvent], float]:
        """Take the events since the last call, in order; wait at most `seconds` for the first.

        The second value is the seconds since the last call in which the engine had nothing to do.
        """
        with self._some:
            self._some.wait_for(lambda: self._events, seconds)
            events, self._events = self._events, []
        before, self._idle = self._idle, self._rollouts.idle.total
        return events, self._idle - before

    def stop(self) -> None:
        """End all groups, and wait until they have ended. Later events are not reported."""
        self._rollouts.loop.run(self._stop())

    async def _stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._rollouts.forget_origins()
        with self._some:
            self._events.clear()

    def _begin(self, key: int, work: PromptTask, entries: Sequence[Entry] | None) -> None:
        self._tasks[key] = asyncio.create_task(self._run(key, work, entries))
        if self._watching is None:
            self._watching = asyncio.create_task(self._rollouts.watch(lambda: self._ends, "rollouts"))

    async def _run(self, key: int, work: PromptTask, entries: Sequence[Entry] | None) -> None:
        emit = partial(self._emit, key)
        log = None if entries is None else Log(lambda: entries or (), emit)
        try:
            with leaked_cancellation_fails(f"prompt {work.ordinal}"):
                ended = await self._rollouts.run_group(work, emit, lambda: self._trajectory_ended(key), log)
            trajectories = self._rollouts.pop_group(work.ordinal)
            emit(ended, trajectories if ended.record is None else None)
        except Exception as error:
            emit(Failure.from_error(error))
        finally:
            del self._tasks[key]
            if not self._tasks and self._watching is not None:
                self._watching.cancel()
                self._watching = None

    def _trajectory_ended(self, key: int) -> None:
        self._ends += 1
        self._emit(key, TrajectoryEnded())

    def _emit(
        self,
        key: int,
        what: int | Entry | TrajectoryEnded | EndedGroup | Failure,
        trajectories: list[Trajectory] | None = None,
    ) -> None:
        with self._some:
            self._events.append(GroupEvent(key, what, trajectories))
            self._some.notify()
