"""Groups in rollout workers under Ray: each begins in one worker, and continues in another one where that dies.

Flow, ledger and journal lie with the driver, on whose event loop the coroutines here run. A worker is asked for single
groups and reports their events. The tokens of a group that has ended lie in the journal, in the run's folder on the
driver's machine, until a batch takes them. Then workers read them and put them into the object store. So ended groups
survive the loss of any worker and any machine but the driver's, and the driver's memory holds a few numbers of each.
Trajectories that the journal leaves out (images, experts, teachers' prompts) lie in the object store, owned by the
driver.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray

from agentrl.config import Config
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import WorkerDied
from agentrl.observe.display import Display
from agentrl.remote.router import ServerAccess
from agentrl.rollouts.context import FirstRows
from agentrl.rollouts.contract import Audience, Rollout, Task
from agentrl.rollouts.groups import EndedGroup, GroupWork, Log, Packed
from agentrl.rollouts.journal import Journal
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.objects import UserObjects
from agentrl.rollouts.ray import ROOM_TOLD, SILENT, SILENT_FOR, SILENT_TOLD, RayRollouts, Starting
from agentrl.rollouts.ray_worker import RolloutWorker, Work, pack_part
from agentrl.rollouts.runner import Hook
from agentrl.rollouts.worker_groups import Answered, GroupBegan, GroupEnded, GroupEvent, GroupFailed, TrajectoryEnded
from agentrl.runtime.ray.pool import ROOM_WITHIN, ask, end, raised
from agentrl.runtime.ray.session import death_of
from agentrl.runtime.ray.watch import GONE
from agentrl.runtime.stall import Stall
from agentrl.system.loop_thread import LoopThread
from agentrl.trajectory import Trajectory
from agentrl.trajectory.sample import Sample

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


class RayGroups(RayRollouts):
    """`RolloutRunner` over all workers.

    When a worker with devices of its own dies and others live, they continue and take its groups, too. The new worker
    takes part from the first weights that are sent once it has started.
    """

    def __init__(
        self,
        config: RolloutsConfig,
        device: str,
        run_dir: Path,
        display: Display,
        nodes: Callable[[], Sequence[str]] | None,
        objects: UserObjects,
        first: FirstRows,
        servers: ServerAccess | None = None,
    ) -> None:
        """See `RayRollouts`."""
        self.loop = LoopThread("groups")
        self.audience: Audience = display
        self.on_loss: Callable[[], object] = lambda: None
        rollout = config.actor_rollout_ref.rollout
        self.samples_on = nodes is None or (rollout.name == "sglang" and not rollout.free_cache_engine)
        self._held = self._released = self._is_open = False
        self._follows = isinstance(config, Config) and config.async_training.max_staleness > 0
        """True: groups are run singly, and workers are followed for events. False: each worker is asked for its part of
        a step alone, and the replacement of a dead worker is waited for."""
        self._keys = itertools.count()
        self._begun: dict[int, _Open] = {}
        """By the key that names a group to its worker."""
        self._idle = 0.0
        self._followed: dict[int, _Followed] = {}
        """By the worker's number: followed workers, and the result of following each."""
        self._unrecorded: dict[int, ray.ObjectRef[list[Trajectory]]] = {}
        """Trajectories that are not in the journal, by the prompt's ordinal."""
        super().__init__(config, device, run_dir, display, nodes, objects, first, servers)
        self._is_open = True
        self.loop.run(self._ask_all())

    @property
    def is_broken(self) -> bool:
        """See `RolloutRunner.is_broken`."""
        return any(self._is_of(number, one) and one.has_ended for number, one in list(self._followed.items()))

    def mend(self) -> None:
        """See `RolloutRunner.mend`."""
        for number, one in sorted(self._followed.items()):
            if not self._is_of(number, one):
                continue
            if one.error is not None:
                raise one.error
            if one.death is not None:
                self._replace(number, f"rollout worker {number + 1} died: {one.death}")

    async def run_group(
        self, work: GroupWork, on_begin: Callable[[int], None], on_end: Callable[[], None], log: Log | None
    ) -> EndedGroup:
        """See `RolloutRunner.run_group`: the group runs in the worker that has fewest."""
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

    async def stop_groups(self) -> None:
        """See `RolloutRunner.stop_groups`."""
        self._unrecorded.clear()
        for call in [actor.stop_groups.remote() for actor in self._ready()]:
            with suppress(*GONE):  # told where its groups are followed
                await call

    async def hold(self) -> None:
        """See `RolloutRunner.hold`."""
        if not self._held:
            self._held = True
            await self._have(_hold)

    async def go_on(self) -> None:
        """See `RolloutRunner.go_on`."""
        if self._held:
            self._held = False
            await self._have(_go_on)

    async def release_weights(self) -> None:
        """See `RolloutRunner.release_weights`."""
        self._released = True
        await self._have(_release_weights)

    async def offer_weights(self, weights: Weights, version: int) -> None:
        """See `RolloutRunner.offer_weights`. A worker that takes another's place is sent these."""
        self._weights, self._released = (weights, version), False
        await self._have(partial(_offer_weights, weights=weights, version=version))

    def update_weights(self, weights: Weights, version: int, *, in_flight: bool = False) -> SyncReport:
        """See `RolloutRunner.update_weights`."""
        self._released = False
        joins = self._join()
        report = super().update_weights(weights, version, in_flight=in_flight)
        if joins:
            self.loop.run(self._welcome())
        return report

    async def idle_seconds(self) -> float:
        """See `RolloutRunner.idle_seconds`: as far as workers have reported it."""
        return self._idle

    @contextmanager
    def observed(self, task: Task, total: int | None) -> Iterator[Callable[[], None]]:
        """See `RolloutRunner.observed`."""
        with self.display.stage(task.name, total=total) as stage:
            yield partial(stage.advance, 1)

    def run(
        self,
        task: Task,
        samples: Sequence[Sample],
        first: int = 0,
        *,
        show: bool = False,
        before: Hook = None,
        after: Hook = None,
    ) -> Rollout:
        """See `RolloutRunner.run`."""
        if before is not None:
            self.loop.run(before())
        made = super().run(task, samples, first, show=show)
        if after is not None:
            self.loop.run(after())
        return made

    def pack(self, task: Task, ordinals: Sequence[int], journal: Journal, *, show: bool = False) -> Packed:
        """See `RolloutRunner.pack`. Each worker makes the part of some groups, wherever they ran."""
        stored: list[ray.ObjectRef[bytes] | ray.ObjectRef[list[Trajectory]]] = [
            self._unrecorded.pop(one) if one in self._unrecorded else ray.put(journal.record(one)) for one in ordinals
        ]
        calls = [
            (
                number,
                partial(pack_part, task=replace(task, share=share), groups=stored[start:end], first=start, show=show),
            )
            for number, share, start, end in self._parts(len(ordinals))
        ]
        parts = self._call(calls, what="packing a batch")
        versions: Counter[int] = sum((one.versions for one in parts), Counter())
        return Packed(self._joined([one.part for one in parts]), versions)

    def close(self) -> None:
        super().close()
        self.loop.close()

    def _replace(self, number: int, death: str) -> None:
        if not self._follows or self._nodes is not None or not self._is_open:  # not open: all start at once
            super()._replace(number, death)
            if self._is_open:
                self.loop.run(self._welcome())
            return
        self._let_start(number, death)
        if not self._living():
            self._await_one()

    def _let_start(self, number: int, death: str) -> None:
        """Start a replacement for a worker that died, without waiting for it. Raises WorkerDied."""
        others = set(self._living()) - {number}
        self._make_anew(number, death, ", and the others go on meanwhile" if others else "")
        self._starting[number] = Starting(self._opened(number))

    def _await_one(self) -> None:
        """Wait until one of the workers that start can take part, and give it the weights. Raises WorkerDied."""
        begun = time.monotonic()
        while not (joins := self._join()):
            rooms = [self._groups[number] for number in self._starting]
            if time.monotonic() - begun > ROOM_WITHIN and not any(room.wait(0.1) for room in rooms):
                raise WorkerDied(f"the cluster had no room for any rollout worker in {ROOM_WITHIN:g} s")
            ray.wait([one.call for one in self._starting.values()], num_returns=1, timeout=1.0)
        for number in joins:
            try:
                self._give_weights(number)
            except GONE as error:
                self._replace(number, f"rollout worker {number + 1} died at its start: {death_of(error)}")
        self.loop.run(self._welcome())

    def _join(self) -> list[int]:
        """Have workers that have started since take part; their numbers. They have no weights yet."""
        joins = []
        for number, one in list(self._starting.items()):
            if not ray.wait([one.call], timeout=0)[0]:
                self._tell_of_room(number, one)
                continue
            try:
                self._start(number, one.call)
            except GONE as error:
                self._let_start(number, f"rollout worker {number + 1} died at its start: {death_of(error)}")
                continue
            del self._starting[number]
            joins.append(number)
            self.display.note(f"rollout worker {number + 1} has started, and takes part from now on")
        return joins

    def _tell_of_room(self, number: int, one: Starting) -> None:
        """Warn, once, where no machine has room for a worker."""
        if not one.is_told and time.monotonic() - one.begun > ROOM_TOLD and not self._groups[number].wait(0.1):
            one.is_told = True
            self.display.warn(
                f"no machine of the cluster has room for rollout worker {number + 1}: it takes part when one joins "
                "(ray start --address=...)"
            )

    async def _welcome(self) -> None:
        """Repeat the others' calls on new workers, and give them groups."""
        if self._released:
            await self._have(_release_weights)
        if self._held:
            await self._have(_hold)
        await self._ask_all()

    async def _ask_all(self) -> None:
        """Follow the groups of each worker, new workers included."""
        if not self._follows:
            return
        for number in self._living():
            actor = self._actors[number]
            if number not in self._followed or self._followed[number].actor is not actor:
                one = self._followed[number] = _Followed(actor)
                one.task = asyncio.create_task(self._follow(number, one))

    async def _follow(self, number: int, one: _Followed) -> None:
        """Pass on a worker's events until it dies; then its groups restart elsewhere."""
        try:
            while True:
                told = await self._answer(number, one.actor.group_events.remote(ASKED_FOR))
                self._idle += told.idle_seconds / max(len(self._living()), 1)  # none: it was just found dead
                for event in told.events:
                    self._meet(event)
                news = await self._answer(number, one.actor.news.remote())
                for text in news.notes:
                    self.display.note(text)
                for text in news.warnings:
                    self.display.warn(text)
        except GONE as error:
            self._lose(one, death_of(error))
        except TimeoutError as error:
            end(one.actor)  # what others wait for ends, too
            self._lose(one, str(error))
        except Exception as error:  # raised where the groups are waited for, or by `mend`
            one.error = error
            self._end_groups_of(one.actor, error)
            self.on_loss()

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
                self.display.warn(f"rollout worker {number + 1} {silent}")
        return answer.result()

    def _lose(self, one: _Followed, death: str) -> None:
        one.death = death
        self._end_groups_of(one.actor, _Lost())
        self.on_loss()

    def _end_groups_of(self, actor: ActorProxy[RolloutWorker], error: Exception) -> None:
        for one in self._begun.values():
            if one.actor is actor and not one.outcome.done():
                one.outcome.set_exception(error)

    def _meet(self, event: GroupEvent) -> None:
        one = self._begun.get(event.key)
        if one is None or one.outcome.done():
            return  # it was cancelled
        match event:
            case GroupBegan():
                one.on_begin(event.version)
            case Answered():
                if one.log is not None:
                    one.log.add(event.entry)
            case TrajectoryEnded():
                one.on_end()
            case GroupEnded():
                if event.trajectories is not None:
                    self._unrecorded[event.group.ordinal] = ray.put(event.trajectories)
                one.outcome.set_result(event.group)
            case GroupFailed():
                number = next((place for place, actor in enumerate(self._actors) if actor is one.actor), 0)
                where = f"rollout worker {number + 1} of {len(self._actors)}"
                one.outcome.set_exception(raised(event.failure, where))

    def _is_of(self, number: int, one: _Followed) -> bool:
        """Say whether it is the worker of that number, and has not been replaced."""
        return self._actors[number] is one.actor

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

    async def _have(self, work: Work[None]) -> None:
        """Have every worker that lives do something with its rollouts."""
        dead = {id(one.actor) for one in self._followed.values() if one.has_ended}
        alive = [self._actors[number] for number in self._living() if id(self._actors[number]) not in dead]
        for number, call in enumerate([ask(actor, RolloutWorker.call, work) for actor in alive]):
            try:
                answer = await call
            except GONE:
                continue  # told where its groups are followed
            if answer is not None:
                raise raised(answer, f"rollout worker {number + 1}")


async def _ask(one: _Open, key: int, work: GroupWork) -> None:
    """Have the worker begin the group; a worker that cannot (e.g. it cannot unpickle a row) ends the group."""
    try:
        await one.actor.begin_group.remote(key, work, None if one.log is None else one.log.read())
    except GONE:
        return  # told where its groups are followed
    except Exception as error:
        if not one.outcome.done():
            one.outcome.set_exception(error)


def _hold(rollouts: LocalRollouts) -> None:
    rollouts.loop.run(rollouts.hold())


def _go_on(rollouts: LocalRollouts) -> None:
    rollouts.loop.run(rollouts.go_on())


def _release_weights(rollouts: LocalRollouts) -> None:
    rollouts.loop.run(rollouts.release_weights())


def _offer_weights(rollouts: LocalRollouts, weights: Weights, version: int) -> None:
    rollouts.loop.run(rollouts.offer_weights(weights, version))
