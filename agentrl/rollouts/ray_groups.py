"""Groups in rollout workers under Ray: each begins in one worker, and continues in another one where that dies.

StalenessScheduler, ledger and journal lie with the driver, on whose event loop the coroutines here run. A worker is
asked for groups and reports their events. Groups that begin together are asked for in one call.

The tokens of a group that has a log, and has ended, lie in the journal, in the run's folder on the driver's machine,
until a batch takes them. Then workers read them and put them into the object store. So ended groups survive the loss of
any worker and any machine but the driver's, and the driver's memory holds a few numbers of each. Trajectories that the
journal leaves out (images, experts, teachers' prompts) lie in the object store, owned by the driver.

The tokens of a group without a log stay in the worker that ran it, which packs them: they never pass through the
driver. Where that worker dies first, its replacement runs the group again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import ray

from agentrl.rollouts.contract import EndedGroup, Log, PromptTask
from agentrl.rollouts.ray_worker import Held, RolloutWorker, Work
from agentrl.rollouts.ray_workers import SILENT, SILENT_FOR, SILENT_TOLD, RolloutWorkers
from agentrl.rollouts.worker_groups import GroupBegin, GroupEvent, TrajectoryEnded
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
    """A group that is to run in a worker."""

    work: PromptTask
    on_begin: Callable[[int], None]
    on_end: Callable[[], None]
    log: Log | None
    number: int | None
    """Number of the worker; None: it has yet to be chosen."""
    outcome: asyncio.Future[EndedGroup]
    actor: ActorProxy[RolloutWorker] | None = None
    """Process of the worker; None: it was not asked yet."""

    @property
    def entries(self) -> Sequence[Entry] | None:
        """Entries of the log."""
        return None if self.log is None else self.log.read()


@dataclass(frozen=True, slots=True)
class _Ended:
    """A group that has ended and whose tokens its worker holds."""

    work: PromptTask
    number: int
    actor: ActorProxy[RolloutWorker]


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
    """

    def __init__(self, workers: RolloutWorkers, on_loss: Callable[[], object]) -> None:
        self._workers, self._on_loss = workers, on_loss
        self._keys = itertools.count()
        self._begun: dict[int, _Open] = {}
        """By the key that names a group to its worker."""
        self._placing: asyncio.Task[None] | None = None
        """Asks workers for the groups that none was asked for yet."""
        self._asking: set[asyncio.Task[None]] = set()
        self._held: dict[int, _Ended] = {}
        """Groups whose trajectories are in their workers, by the prompt's ordinal."""
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
                self._workers.replace(number, f"rollout worker {number + 1} died in rollout: {one.death}")

    async def run(
        self, work: PromptTask, on_begin: Callable[[int], None], on_end: Callable[[], None], log: Log | None
    ) -> EndedGroup:
        """Run a group: groups that begin in one turn of the loop are divided among the workers, by what these run.

        Where its worker dies, a group without a log restarts in the worker that takes its place: a step's parts stay
        with their workers.
        """
        number = None
        while True:
            one = _Open(work, on_begin, on_end, log, number, asyncio.get_running_loop().create_future())
            try:
                return await self._run(one)
            except _Lost:
                number = one.number if log is None else None

    async def _run(self, one: _Open) -> EndedGroup:
        """Run a group in one worker. Raises _Lost where that dies."""
        key = next(self._keys)
        self._begun[key] = one
        if self._placing is None:
            self._placing = asyncio.create_task(self._place())
        try:
            return await one.outcome
        finally:
            del self._begun[key]

    async def _place(self) -> None:
        """Ask workers for the groups without a worker, each for neighbours; wait for a worker where all have died."""
        while not (ready := self._ready()):
            await asyncio.sleep(ASKED_FOR / 10)
        self._placing = None
        begun = Counter(one.number for one in self._begun.values() if one.actor is not None)
        asked = {key: one for key, one in self._begun.items() if one.actor is None}
        free = [one for one in asked.values() if one.number not in self._workers.living]
        shares = Counter[int]()
        for _ in free:
            shares[min(ready, key=lambda number: (begun[number] + shares[number], -number))] += 1
        for one, number in zip(free, sorted(shares.elements()), strict=True):
            one.number = number
        for number, actor in ready.items():
            groups = [GroupBegin(key, one.work, one.entries) for key, one in asked.items() if one.number == number]
            for group in groups:
                asked[group.key].actor = actor
            if groups:
                asking = asyncio.create_task(self._ask(actor, groups))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)
        if any(one.actor is None for one in asked.values()):  # their worker starts in another's place
            self._placing = asyncio.create_task(self._place_later())

    async def _place_later(self) -> None:
        await asyncio.sleep(ASKED_FOR / 10)
        await self._place()

    async def _ask(self, actor: ActorProxy[RolloutWorker], groups: Sequence[GroupBegin]) -> None:
        """Have the worker begin groups; a worker that cannot (e.g. it cannot unpickle a row) ends them."""
        try:
            await actor.begin_groups.remote(groups)
        except GONE:
            return  # told where its groups are followed
        except Exception as error:
            for group in groups:
                one = self._begun.get(group.key)
                if one is not None and not one.outcome.done():
                    one.outcome.set_exception(error)

    async def stop(self) -> None:
        """End all groups in all workers, and forget groups that had ended."""
        self._unrecorded.clear()
        self._held.clear()
        for call in [actor.stop_groups.remote() for actor in self._ready().values()]:
            with suppress(*GONE):  # told where its groups are followed
                await call

    def holders(self, ordinals: Sequence[int]) -> list[int] | None:
        """Return the numbers of the workers that hold the groups; None where they do not."""
        return None if ordinals[0] not in self._held else [self._held[one].number for one in ordinals]

    def lost(self, ordinals: Sequence[int]) -> list[int]:
        """Return the groups whose trajectories died with their worker."""
        held = ((one, self._held[one]) for one in ordinals if one in self._held)
        return [ordinal for ordinal, its in held if self._workers.actors[its.number] is not its.actor]

    async def run_again(self, ordinals: Sequence[int]) -> None:
        """Run groups again whose trajectories are lost, until all have ended or their worker has died."""
        again = (self._held[one] for one in ordinals)
        loop = asyncio.get_running_loop()
        groups = [_Open(one.work, _ignore, _ignore, None, one.number, loop.create_future()) for one in again]
        for outcome in await asyncio.gather(*map(self._run, groups), return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, _Lost):
                raise outcome

    def packed(self, ordinals: Sequence[int]) -> None:
        """Forget groups that were packed."""
        for one in ordinals:
            self._held.pop(one, None)

    def pop(self, ordinal: int) -> Held | None:
        """Give up the trajectories of a group that has ended; None where the journal has them."""
        return ordinal if ordinal in self._held else self._unrecorded.pop(ordinal, None)

    async def follow(self) -> None:
        """Follow the groups of each worker, new workers included."""
        for number in self._workers.living:
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
                if one.log is None:
                    assert one.number is not None and one.actor is not None
                    self._held[group.ordinal] = _Ended(one.work, one.number, one.actor)
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

    def _ready(self) -> dict[int, ActorProxy[RolloutWorker]]:
        """Return the workers that live and are followed, by number: a replacement is followed once it has opened."""
        found = sorted(self._followed.items())
        return {number: one.actor for number, one in found if self._is_of(number, one) and not one.has_ended}


def _ignore(version: int = 0) -> None:
    """Take no note of an event."""
