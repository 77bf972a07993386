"""One rollout worker under Ray: a process that runs its part of a step's trajectories.

The tokens that it makes stay in the object store.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TypeVar

import ray

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.remote.router import ServerAccess
from agentrl.rollouts.context import FirstRows, load_chat, load_context
from agentrl.rollouts.contract import Rollout, Task
from agentrl.rollouts.journal import trajectories_in
from agentrl.rollouts.local import LocalRollouts, open_local_rollouts
from agentrl.rollouts.objects import UserObjects
from agentrl.rollouts.worker_groups import GroupBegin, GroupEvent, WorkerGroups
from agentrl.runtime.ray.rank import Failure, Place
from agentrl.runtime.ray.session import Surroundings
from agentrl.runtime.ray.stored import put_batch
from agentrl.system.garbage import frozen
from agentrl.system.reporter import Reporter
from agentrl.trajectory import Trajectory

T = TypeVar("T")
Work = Callable[[LocalRollouts], T]
"""Work that the driver gives a worker. Pickled: a function of a module, with its arguments by `functools.partial`."""


@dataclass(slots=True)
class StatusUpdate:
    """Notes and warnings of a worker since the driver last asked."""

    notes: list[str]
    warnings: list[str]

    def show(self, reporter: Reporter) -> None:
        """Show notes and warnings to the user."""
        for text in self.notes:
            reporter.note(text)
        for text in self.warnings:
            reporter.warn(text)


class StatusBuffer:
    """`Reporter` in a rollout worker: keeps messages for the display until the driver asks for them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._update = StatusUpdate([], [])

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[StatusBuffer]:
        yield self

    def advance(self, count: int = 1, **values: float) -> None:
        """Say nothing: the driver hears of each trajectory's end (`WorkerGroups`)."""

    def note(self, text: str) -> None:
        with self._lock:
            self._update.notes.append(text)

    def warn(self, text: str) -> None:
        with self._lock:
            self._update.warnings.append(text)

    def take(self) -> StatusUpdate:
        with self._lock:
            update, self._update = self._update, StatusUpdate([], [])
        return update


class RolloutWorker:
    """A Ray actor around `LocalRollouts`. Every method returns a result for the driver: a value, or a Failure."""

    def __init__(self, surroundings: Surroundings) -> None:
        surroundings.enter()
        self.status = StatusBuffer()
        self.stack = ExitStack()
        self.rollouts: LocalRollouts
        self.groups: WorkerGroups

    def open(
        self,
        config: RolloutsConfig,
        device: str,
        run_dir: Path,
        share: tuple[int, int],
        objects: UserObjects,
        first: FirstRows,
        servers: ServerAccess | None = None,
    ) -> Failure | None:
        """Start engine and tools, and try scorers and interactions on the rows of `first`."""
        try:
            scored = getattr(config.data, "output_scores", True)
            context = replace(load_context(config, objects, scored=scored), first=first)
            chat = load_chat(config)
            context.bind(chat)
            context.serve(servers, config.actor_rollout_ref.model.chat_template_date)
            opened = open_local_rollouts(config, device, chat, context, run_dir, self.status, share)
            self.rollouts = self.stack.enter_context(opened)
            self.stack.enter_context(frozen())
            self.groups = WorkerGroups(self.rollouts)
            self.rollouts.loop.call_soon(self.rollouts.idle.begin)
        except Exception as error:
            return Failure.from_error(error)
        return None

    def call(self, work: Work[T]) -> T | Failure:
        """Do `work` with the rollouts."""
        try:
            return work(self.rollouts)
        except (Exception, CancelledError) as error:
            return Failure.from_error(error)

    @ray.method(concurrency_group="status")
    def place(self) -> Place:
        """Return the process and machine."""
        return Place.here()

    @ray.method(concurrency_group="status")
    def status_update(self) -> StatusUpdate:
        """Take notes and warnings since the last call."""
        return self.status.take()

    @ray.method(concurrency_group="status")
    def begin_groups(self, groups: Sequence[GroupBegin]) -> None:
        """Begin groups, which run next to all other calls."""
        self.groups.begin(groups)

    @ray.method(concurrency_group="groups")
    def group_events(self, seconds: float) -> tuple[list[GroupEvent], float]:
        """Take the events of groups since the last call, and its seconds of an idle engine; wait `seconds` at most."""
        return self.groups.events(seconds)

    @ray.method(concurrency_group="status")
    def stop_groups(self) -> None:
        """End all groups."""
        self.groups.stop()

    def close(self) -> None:
        """End engine and tools."""
        self.stack.close()


Held = int | ray.ObjectRef[bytes] | ray.ObjectRef[list[Trajectory]]
"""A group that has ended: its record of the journal, its trajectories, or its ordinal, in the worker that ran it."""
RolloutPart = tuple[Rollout, int]
"""A worker's part of a rollout, with its batches in the object store, and the worker's number from 0."""


def pack_part(
    rollouts: LocalRollouts,
    task: Task,
    groups: Sequence[Held],
    first: int,
    show: bool,
) -> RolloutPart | None:
    """Make a part of a batch of groups, numbered from `first`: records of the journal, or trajectories as they are.

    None: this worker took the place of another, in which a group had ended.
    """
    read = []
    for one in groups:
        found = rollouts.pop_group(one) if isinstance(one, int) else ray.get(one)
        if found is None:
            return None
        read.append(trajectories_in(found) if isinstance(found, bytes) else found)
    return _stored(rollouts.pack_groups(task, read, first, show=show), rollouts)


def _stored(made: Rollout, rollouts: LocalRollouts) -> RolloutPart:
    batch, read = (None if one is None else put_batch(one.load()) for one in (made.batch, made.conversations))
    return replace(made, batch=batch, conversations=read), rollouts.share[0] - 1
