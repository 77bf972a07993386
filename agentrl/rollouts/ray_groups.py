"""Groups in rollout workers under Ray: each begins in one worker, and goes on in another one where that dies.

Flow, ledger and journal lie with the driver, on whose event loop the coroutines here run. A worker is asked for single
groups and tells what becomes of them. The tokens of a group that has ended lie in the journal, in the run's folder on
the driver's machine, until a batch takes them: then workers read them and put them into the object store. So what has
ended is lost with no worker and no machine but the driver's, and the driver's memory holds a few numbers of each.
What the journal leaves out (images, experts, teachers' prompts) lies in the object store, owned by the driver.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.weights import SyncReport, Weights
from agentrl.observe.display import Display
from agentrl.remote.router import ServerAccess
from agentrl.rollouts.context import FirstRows
from agentrl.rollouts.contract import Rollout, Task
from agentrl.rollouts.groups import EndedGroup, GroupWork, Log, Packed
from agentrl.rollouts.journal import Journal
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.objects import UserObjects
from agentrl.rollouts.ray import RayRollouts, joined
from agentrl.rollouts.ray_worker import RolloutWorker, Work, pack_part
from agentrl.rollouts.worker_groups import Answered, GroupBegan, GroupEnded, GroupEvent, GroupFailed, TrajectoryEnded
from agentrl.runtime.ray.pool import ask, raised
from agentrl.runtime.ray.session import death_of
from agentrl.runtime.ray.watch import GONE
from agentrl.system.loop_thread import LoopThread
from agentrl.trajectory import Trajectory
from agentrl.trajectory.sample import Sample

if TYPE_CHECKING:
    from ray.actor import ActorProxy

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


class RayGroups(RayRollouts):
    """`GroupRollouts` over all workers."""

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
        self.audience = display
        self.on_loss: Callable[[], object] = lambda: None
        rollout = config.actor_rollout_ref.rollout
        self.samples_on = nodes is None or (rollout.name == "sglang" and not rollout.free_cache_engine)
        self._held = self._released = self._is_open = False
        self._keys = itertools.count()
        self._begun: dict[int, _Open] = {}
        """By the key that names a group to its worker."""
        self._asking: dict[int, tuple[ActorProxy[RolloutWorker], asyncio.Task[None]]] = {}
        """By the worker's number: the one that is asked what happened, again and again."""
        self._deaths: dict[int, tuple[ActorProxy[RolloutWorker], str]] = {}
        """By the worker's number: those of which it is known that they died."""
        self._unrecorded: dict[int, ray.ObjectRef[list[Trajectory]]] = {}
        """Trajectories that are not in the journal, by the prompt's ordinal."""
        super().__init__(config, device, run_dir, display, nodes, objects, first, servers)
        self._is_open = True
        self.loop.run(self._ask_all())

    @property
    def is_broken(self) -> bool:
        """See `GroupRollouts.is_broken`."""
        return any(self._actors[number] is actor for number, (actor, _) in list(self._deaths.items()))

    def mend(self) -> None:
        """See `GroupRollouts.mend`."""
        for number, (actor, death) in sorted(self._deaths.items()):
            if self._actors[number] is actor:
                self._replace(number, f"rollout worker {number + 1} died: {death}")

    async def run_group(
        self, work: GroupWork, on_begin: Callable[[int], None], on_end: Callable[[], None], log: Log | None
    ) -> EndedGroup:
        """See `GroupRollouts.run_group`: the group runs in the worker that has fewest."""
        while True:
            key, actor = next(self._keys), await self._least_busy()
            outcome = asyncio.get_running_loop().create_future()
            self._begun[key] = _Open(actor, outcome, on_begin, on_end, log)
            actor.begin_group.remote(key, work, None if log is None else log.read())
            try:
                return await outcome
            except _Lost:
                continue
            finally:
                del self._begun[key]

    async def stop_groups(self) -> None:
        """See `GroupRollouts.stop_groups`."""
        self._unrecorded.clear()
        for call in [actor.stop_groups.remote() for actor in self._ready()]:
            with suppress(*GONE):  # told where its groups are followed
                await call

    async def hold(self) -> None:
        """See `GroupRollouts.hold`."""
        if not self._held:
            self._held = True
            await self._have(_hold)

    async def go_on(self) -> None:
        """See `GroupRollouts.go_on`."""
        if self._held:
            self._held = False
            await self._have(_go_on)

    async def release_weights(self) -> None:
        """See `GroupRollouts.release_weights`."""
        self._released = True
        await self._have(_release_weights)

    async def offer_weights(self, weights: Weights, version: int) -> None:
        """See `GroupRollouts.offer_weights`. A worker that takes another's place is sent these."""
        self._weights, self._released = (weights, version), False
        await self._have(partial(_offer_weights, weights=weights, version=version))

    def update_weights(self, weights: Weights, version: int, *, in_flight: bool = False) -> SyncReport:
        """See `GroupRollouts.update_weights`."""
        self._released = False
        return super().update_weights(weights, version, in_flight=in_flight)

    async def idle_share(self) -> float:
        """See `GroupRollouts.idle_share`: a worker without a group has nothing to do."""
        busy = {id(one.actor) for one in self._begun.values()}
        return 1.0 if self._held else 1 - len(busy) / len(self._actors)

    @contextmanager
    def observed(self, task: Task, total: int | None) -> Iterator[Callable[[], None]]:
        """See `GroupRollouts.observed`."""
        with self.display.stage(task.name, total=total) as stage:
            yield partial(stage.advance, 1)

    def run_beside(
        self,
        task: Task,
        samples: Sequence[Sample],
        first: int,
        *,
        show: bool,
        before: Callable[[], Awaitable[None]],
        after: Callable[[], Awaitable[None]],
    ) -> Rollout:
        """See `GroupRollouts.run_beside`."""
        self.loop.run(_awaited(before))
        made = self.run(task, samples, first, show=show)
        self.loop.run(_awaited(after))
        return made

    def pack(self, task: Task, ordinals: Sequence[int], journal: Journal, *, show: bool = False) -> Packed:
        """See `GroupRollouts.pack`. Each worker makes the part of some groups, wherever they ran."""
        count = len(self._actors)
        bounds = [len(ordinals) * number // count for number in range(count + 1)]
        stored: list[ray.ObjectRef[bytes] | ray.ObjectRef[list[Trajectory]]] = [
            self._unrecorded.pop(one) if one in self._unrecorded else ray.put(journal.record(one)) for one in ordinals
        ]
        calls = [
            partial(pack_part, task=task, groups=stored[start:end], first=start, show=show)
            for start, end in itertools.pairwise(bounds)
        ]
        parts = self._call(calls, what="packing a batch")
        versions: Counter[int] = sum((one.versions for one in parts), Counter())
        return Packed(joined([one.part for one in parts]), versions)

    def check(self) -> None:
        """See `GroupRollouts.check`. A worker checks its own tools after each group."""

    def close(self) -> None:
        super().close()
        self.loop.close()

    def _replace(self, number: int, death: str) -> None:
        super()._replace(number, death)
        if self._is_open:
            self.loop.run(self._welcome())

    async def _welcome(self) -> None:
        """Have new workers do as the others were told, and give them groups."""
        if self._released:
            await self._have(_release_weights)
        if self._held:
            await self._have(_hold)
        await self._ask_all()

    async def _ask_all(self) -> None:
        """Have each worker asked what happens to its groups, those that are new, too."""
        for number, actor in enumerate(self._actors):
            if number not in self._asking or self._asking[number][0] is not actor:
                self._asking[number] = actor, asyncio.create_task(self._follow(number, actor))

    async def _follow(self, number: int, actor: ActorProxy[RolloutWorker]) -> None:
        """Pass on what a worker tells, until it dies: then its groups begin anew elsewhere."""
        try:
            while True:
                for event in await actor.group_events.remote(ASKED_FOR):
                    self._meet(event)
                news = await actor.news.remote()
                for text in news.notes:
                    self.display.note(text)
                for text in news.warnings:
                    self.display.warn(text)
        except GONE as error:
            self._deaths[number] = actor, death_of(error)
            self._end_groups_of(actor, _Lost())
            self.on_loss()
        except Exception as error:  # raised where the groups are waited for
            self._end_groups_of(actor, error)

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

    def _alive(self) -> list[ActorProxy[RolloutWorker]]:
        dead = {id(actor) for actor, _ in self._deaths.values()}
        return [actor for actor in self._actors if id(actor) not in dead]

    async def _least_busy(self) -> ActorProxy[RolloutWorker]:
        """Return the worker that runs fewest groups; wait for one where all have died."""
        while not (ready := self._ready()):
            await asyncio.sleep(ASKED_FOR / 10)
        running = Counter(id(one.actor) for one in self._begun.values())
        return min(ready, key=lambda actor: running[id(actor)])

    def _ready(self) -> list[ActorProxy[RolloutWorker]]:
        """Return the workers that live and are followed: one that takes another's place is not before it has opened."""
        followed = {id(actor) for actor, _ in self._asking.values()}
        return [actor for actor in self._alive() if id(actor) in followed]

    async def _have(self, work: Work[None]) -> None:
        """Have every worker that lives do something with its rollouts."""
        for number, call in enumerate([ask(actor, RolloutWorker.call, work) for actor in self._alive()]):
            try:
                answer = await call
            except GONE:
                continue  # told where its groups are followed
            if answer is not None:
                raise raised(answer, f"rollout worker {number + 1}")


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def _hold(rollouts: LocalRollouts) -> None:
    rollouts.loop.run(rollouts.hold())


def _go_on(rollouts: LocalRollouts) -> None:
    rollouts.loop.run(rollouts.go_on())


def _release_weights(rollouts: LocalRollouts) -> None:
    rollouts.loop.run(rollouts.release_weights())


def _offer_weights(rollouts: LocalRollouts, weights: Weights, version: int) -> None:
    rollouts.loop.run(rollouts.offer_weights(weights, version))
