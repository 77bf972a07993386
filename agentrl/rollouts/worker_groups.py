"""Groups that a rollout worker under Ray runs concurrently, and their events for the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Condition

from agentrl.errors import TrainingError
from agentrl.rollouts.contract import EndedGroup, Log, PromptTask
from agentrl.rollouts.local import LocalRollouts
from agentrl.runtime.ray.rank import Failure
from agentrl.system.call_journal import Entry
from agentrl.system.cancellation import leaked_cancellation_fails
from agentrl.trajectory import Trajectory

GATHERED_FOR = 0.1
"""Seconds for which mere progress of trajectories waits for other events to be reported with."""


@dataclass(frozen=True, slots=True)
class GroupBegin:
    """A group that is to begin."""

    key: int
    """Names it in its events."""
    work: PromptTask
    entries: Sequence[Entry] | None
    """Entries of its `Log`; None: it has no log."""


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
    """Trajectories of a group that has ended; None where the journal's record has them, or they stay in the worker."""


class WorkerGroups:
    """The groups of one worker. Methods are called from any thread; groups run on the loop of `rollouts`."""

    def __init__(self, rollouts: LocalRollouts) -> None:
        self._rollouts = rollouts
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._events: list[GroupEvent] = []
        self._is_urgent = False
        """One of the events is more than progress."""
        self._some = Condition()
        self._ends = 0
        self._observing: asyncio.Task[None] | None = None
        """Warns which events groups wait for, and profiles the groups of a step, while there are some."""
        self._none_left = asyncio.Event()
        """Set once no group is left of those that are observed."""
        self._idle = 0.0
        """Seconds of an idle engine that were reported."""

    def begin(self, groups: Sequence[GroupBegin]) -> None:
        """Begin groups together."""
        self._rollouts.loop.call_soon(partial(self._begin, groups))

    def events(self, seconds: float) -> tuple[list[GroupEvent], float]:
        """Take the events since the last call, in order; wait at most `seconds` for the first.

        The second value is the seconds since the last call in which the engine had nothing to do.
        """
        with self._some:
            self._some.wait_for(lambda: self._events, seconds)
            self._some.wait_for(lambda: self._is_urgent or not self._events, GATHERED_FOR)
            events, self._events, self._is_urgent = self._events, [], False
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
        await self._rollouts.stop_groups()
        with self._some:
            self._events.clear()
            self._is_urgent = False

    def _begin(self, groups: Sequence[GroupBegin]) -> None:
        for one in groups:
            self._tasks[one.key] = asyncio.create_task(self._run(one))
        if self._observing is None:
            self._none_left = asyncio.Event()
            self._observing = asyncio.create_task(self._observe(groups[0], self._none_left))

    async def _observe(self, first: GroupBegin, none_left: asyncio.Event) -> None:
        watch = asyncio.create_task(self._rollouts.watch(lambda: self._ends, "rollouts"))
        # A step's groups end before others begin.
        try:
            with self._rollouts.profiled(first.work.task) if first.entries is None else nullcontext():
                await none_left.wait()
        except TrainingError as error:  # a full disk, which what is trained on does not depend on
            self._rollouts.reporter.warn(str(error))
        finally:
            watch.cancel()

    async def _run(self, one: GroupBegin) -> None:
        key, work, entries = one.key, one.work, one.entries
        emit = partial(self._emit, key)
        log = None if entries is None else Log(lambda: entries, emit)
        try:
            with leaked_cancellation_fails(f"prompt {work.ordinal}"):
                ended = await self._rollouts.run_group(work, emit, lambda: self._trajectory_ended(key), log)
            trajectories = None
            if log is not None:  # else they stay until they are packed
                trajectories = self._rollouts.pop_group(work.ordinal)
            emit(ended, trajectories if ended.record is None else None)
        except Exception as error:
            emit(Failure.from_error(error))
        finally:
            del self._tasks[key]
            if not self._tasks:
                self._none_left.set()
                self._observing = None

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
            self._is_urgent = self._is_urgent or not isinstance(what, int | TrajectoryEnded)
            self._some.notify()
