"""Groups in rollout workers under Ray: each begins in one worker, and continues in another one where that dies.

StalenessScheduler, ledger and journal lie with the driver, on whose event loop the coroutines here run. A worker is
asked for single groups and reports their events. The tokens of a group that has ended lie in the journal, in the run's
folder on the driver's machine, until a batch takes them. Then workers read them and put them into the object store. So
ended groups survive the loss of any worker and any machine but the driver's, and the driver's memory holds a few
numbers of each. Trajectories that the journal leaves out (images, experts, teachers' prompts) lie in the object store,
owned by the driver.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import ray

from agentrl.rollouts.contract import EndedGroup, Log, PromptTask
from agentrl.rollouts.ray_worker import RolloutWorker, Work
from agentrl.rollouts.ray_workers import SILENT, SILENT_FOR, SILENT_TOLD, RolloutWorkers
from agentrl.rollouts.worker_groups import GroupEvent, TrajectoryEnded
from agentrl.runtime.ray.pool import ask, end, raised
from agentrl.runtime.ray.session import death_of
from agentrl.runtime.ray.watch import GONE
from agentrl.runtime.stall import Stall
from agentrl.system.call_journal import Entry
from agentrl.trajectory import Trajectory

if TYPE_CHECKING:
    from ray.actor import ActorProxy

T = TypeVar("T")
ASKED_FOR = 1.0
"""Seconds that a worker waits until something happens before it answers that nothing has."""


class _Lost(Exception):
    """The worker died in which a group ran."""


@dataclass(slots=True)
class _Open:
    """A group that a worker runs."""

    actor: ActorProxy[RolloutWorker]
    outcome: asyncio.Future[EndedGroup]
    on_begin: Callable[[int], None]
    on_end: Callable[[], None]
    log: Log | None


@dataclass(slots=True)
class _Followed:
    """A worker that is asked repeatedly for the events of its groups."""

    actor: ActorProxy[RolloutWorker]
    task: asyncio.Task[None] | None = None
    death: str | None = None
    """Text about its death."""
    error: Exception | None = None
    """Another error that ended the asking."""

    @property
    def has_ended(self) -> bool:
        """True where it is asked no more."""
        return self.death is not None or self.error is not None


class RayGroups:
    """The groups that workers run, and the following of their events.

    Args:
        loop: the event loop on which coroutines run.
        on_loss: called on it when groups cannot continue until `replace_dead_workers` is called.
        follows: groups are run singly, and workers are followed for events. Otherwise each worker is asked for its part
            of a step alone.
    """

    def __init__(self, workers: RolloutWorkers, on_loss: Callable[[], object], *, follows: bool) -> None:
        self._workers, self._on_loss, self._follows = workers, on_loss, follows
        self._keys = itertools.count()
        self._begun: dict[int, _Open] = {}
        """By the key that names a group to its worker."""
        self.idle_seconds = 0.0
        """Seconds in which engines had nothing to do, on average, as far as workers have reported it."""
        self._followed: dict[int, _Followed] = {}
        """By the worker's number: followed workers, and the result of following each."""
        self._unrecorded: dict[int, ray.ObjectRef[list[Trajectory]]] = {}
        """Trajectories that are not in the journal, by the prompt's ordinal."""

    @property
    def is_broken(self) -> bool:
        return any(self._is_of(number, one) and one.has_ended for number, one in list(self._followed.items()))

    def replace_dead_workers(self) -> None:
        """Replace workers that died. Raises WorkerDied where that is not allowed, and other errors of theirs."""
        for number, one in sorted(self._followed.items()):
            if not self._is_of(number, one):
                continue
            if one.error is not None:
                raise one.error
            if one.death is not None:
                self._workers.replace(number, f"rollout worker {number + 1} died: {one.death}")

    async def run(
        self, work: PromptTask, on_begin: Callable[[int], None], on_end: Callable[[], None], log: Log | None
    ) -> EndedGroup:
        """The group runs in the worker that has fewest."""
        while True:
            key, actor = next(self._keys), await self._least_busy()
            outcome = asyncio.get_running_loop().create_future()
            one = self._begun[key] = _Open(actor, outcome, on_begin, on_end, log)
            asking = asyncio.create_task(_ask(one, key, work))
            try:
                return await outcome
            except _Lost:
                continue
            finally:
                asking.cancel()
                del self._begun[key]

    async def stop(self) -> None:
        """End all groups in all workers, and forget groups that had ended."""
        self._unrecorded.clear()
        for call in [actor.stop_groups.remote() for actor in self._ready()]:
            with suppress(*GONE):  # told where its groups are followed
                await call

    def pop(self, ordinal: int) -> ray.ObjectRef[list[Trajectory]] | None:
        """Give up the trajectories of a group that has ended; None where the journal has them."""
        return self._unrecorded.pop(ordinal, None)

    async def follow(self) -> None:
        """Follow the groups of each worker, new workers included."""
        for number in self._workers.living if self._follows else ():
            actor = self._workers.actors[number]
            if number not in self._followed or self._followed[number].actor is not actor:
                one = self._followed[number] = _Followed(actor)
                one.task = asyncio.create_task(self._follow(number, one))

    async def broadcast(self, work: Work[None]) -> None:
        """Have every worker that lives do something with its rollouts."""
        dead = {id(one.actor) for one in self._followed.values() if one.has_ended}
        alive = [
            self._workers.actors[number]
            for number in self._workers.living
            if id(self._workers.actors[number]) not in dead
        ]
        for number, call in enumerate([ask(actor, RolloutWorker.call, work) for actor in alive]):
            try:
                answer = await call
            except GONE:
                continue  # told where its groups are followed
            if answer is not None:
                raise raised(answer, f"rollout worker {number + 1}")

    async def _follow(self, number: int, one: _Followed) -> None:
        """Pass on a worker's events until it dies; then its groups restart elsewhere."""
        try:
            while True:
                events, idle = await self._answer(number, one.actor.group_events.remote(ASKED_FOR))
                self.idle_seconds += idle / max(len(self._workers.living), 1)  # none: it was just found dead
                for event in events:
                    self._dispatch(event)
                update = await self._answer(number, one.actor.status_update.remote())
                update.show(self._workers.display)
        except GONE as error:
            self._lose(one, death_of(error))
        except TimeoutError as error:
            end(one.actor)  # what others wait for ends, too
            self._lose(one, str(error))
        except Exception as error:  # raised where the groups are waited for, or by `replace_dead_workers`
            one.error = error
            self._end_groups_of(one.actor, error)
            self._on_loss()

    async def _answer(self, number: int, call: ray.ObjectRef[T]) -> T:
        """Wait for a call that a worker answers at once, even while it runs groups. Raises TimeoutError after
        SILENT_FOR."""
        answer, stall = asyncio.wrap_future(call.future()), Stall(SILENT_TOLD, SILENT_FOR)
        while not (await asyncio.wait({answer}, timeout=stall.next()))[0]:
            silent = f"has not answered for {stall.seconds:.0f} s: {SILENT}"
            if stall.over:
                answer.cancel()
                raise TimeoutError(f"it {silent}")
            if stall.due():
                self._workers.display.warn(f"rollout worker {number + 1} {silent}")
        return answer.result()

    def _lose(self, one: _Followed, death: str) -> None:
        one.death = death
        self._end_groups_of(one.actor, _Lost())
        self._on_loss()

    def _end_groups_of(self, actor: ActorProxy[RolloutWorker], error: Exception) -> None:
        for one in self._begun.values():
            if one.actor is actor and not one.outcome.done():
                one.outcome.set_exception(error)

    def _dispatch(self, event: GroupEvent) -> None:
        one = self._begun.get(event.key)
        if one is None or one.outcome.done():
            return  # it was cancelled
        match event.what:
            case int() as version:
                one.on_begin(version)
            case Entry() as entry:
                if one.log is not None:
                    one.log.add(entry)
            case TrajectoryEnded():
                one.on_end()
            case EndedGroup() as group:
                if event.trajectories is not None:
                    self._unrecorded[group.ordinal] = ray.put(event.trajectories)
                one.outcome.set_result(group)
            case failure:
                number = next((place for place, actor in enumerate(self._workers.actors) if actor is one.actor), 0)
                where = f"rollout worker {number + 1} of {len(self._workers.actors)}"
                one.outcome.set_exception(raised(failure, where))

    def _is_of(self, number: int, one: _Followed) -> bool:
        """Say whether it is the worker of that number, and has not been replaced."""
        return self._workers.actors[number] is one.actor

    async def _least_busy(self) -> ActorProxy[RolloutWorker]:
        """Return the worker that runs fewest groups; wait for one where all have died."""
        while not (ready := self._ready()):
            await asyncio.sleep(ASKED_FOR / 10)
        running = Counter(id(one.actor) for one in self._begun.values())
        return min(ready, key=lambda actor: running[id(actor)])

    def _ready(self) -> list[ActorProxy[RolloutWorker]]:
        """Return the workers that live and are followed: a replacement is followed once it has opened."""
        found = self._followed.items()
        return [one.actor for number, one in found if self._is_of(number, one) and not one.has_ended]


async def _ask(one: _Open, key: int, work: PromptTask) -> None:
    """Have the worker begin the group; a worker that cannot (e.g. it cannot unpickle a row) ends the group."""
    try:
        await one.actor.begin_group.remote(key, work, None if one.log is None else one.log.read())
    except GONE:
        return  # told where its groups are followed
    except Exception as error:
        if not one.outcome.done():
            one.outcome.set_exception(error)
