"""The runner of rollouts in processes of their own under Ray: the tokens that they make stay in the object store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray

from agentrl.config import Config
from agentrl.engines.weights import SyncReport, Weights
from agentrl.observe.display import Display
from agentrl.observe.report import Report
from agentrl.rollouts.contract import EndedGroup, Log, PromptTask, Rollout, Task
from agentrl.rollouts.journal import Journal
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.ray_groups import RayGroups
from agentrl.rollouts.ray_placing import WorkerMaker
from agentrl.rollouts.ray_worker import Held, RolloutPart, pack_part
from agentrl.rollouts.ray_workers import RolloutWorkers
from agentrl.runtime.ray.pool import WeightReader
from agentrl.system.loop_thread import LoopThread
from agentrl.system.metrics import Metrics
from agentrl.system.reporter import Reporter
from agentrl.trajectory import Outline


class RayRunner:
    """`RolloutRunner` over all workers.

    When a worker with devices of its own dies in an asynchronous run and others live, they continue and take its
    groups, too.
    """

    def __init__(self, maker: WorkerMaker, run_dir: Path, display: Display) -> None:
        """Raises every error that keeps a worker from starting."""
        self.config, rollout = maker.config, maker.config.actor_rollout_ref.rollout
        self.run_dir, self.display = run_dir.absolute(), display
        self.reporter: Reporter = display
        self.loop = LoopThread("groups")
        self.on_loss: Callable[[], object] = lambda: None
        self.serves_people = False
        self.takes_version: Callable[[int, int], bool] = lambda ordinal, version: False
        self.in_flight_updates = maker.nodes is None or (rollout.serves and not rollout.free_cache_engine)
        self.needs_weights = False
        """See `RolloutRunner.needs_weights`."""
        self._is_paused = self._is_locked = False
        self._wrote: dict[Path, int] = {}
        """Numbers of the workers that wrote the newest rollout's files."""
        overlaps = isinstance(maker.config, Config) and maker.config.async_training.max_staleness > 0
        try:
            self.workers = RolloutWorkers(maker, display, self._join, continues=overlaps and maker.nodes is None)
        except BaseException:
            self.loop.close()
            raise
        self.groups = RayGroups(self.workers, lambda: self.on_loss())
        self.loop.run(self.groups.follow())

    @property
    def is_broken(self) -> bool:
        return self.groups.is_broken

    def pack(
        self, task: Task, ordinals: Sequence[int], journal: Journal | None, first: int = 0, *, show: bool = False
    ) -> Rollout:
        """Each worker makes the part of the groups that it holds; of others, which ran anywhere, some."""
        stored: list[Held] = []
        for one in ordinals:
            if (its := self.groups.pop(one)) is None:
                assert journal is not None
                its = ray.put(journal.record(one))
            stored.append(its)
        places = self._parts(ordinals)
        calls = [
            (
                number,
                partial(pack_part, task=replace(task, share=share), groups=stored[a:b], first=first + a, show=show),
            )
            for number, share, a, b in places
        ]
        made: dict[int, RolloutPart] = {}
        while left := [place for place in range(len(calls)) if place not in made]:
            while lost := self.groups.lost(ordinals):
                self.replace_dead_workers()
                self.loop.run(self.groups.run_again(lost))
            answers = self.workers.call([calls[place] for place in left], what="packing a batch")
            for place, part in zip(left, answers, strict=True):
                if part is not None:
                    made[place] = part
                    self.groups.packed(ordinals[places[place][2] : places[place][3]])
        parts = [made[place] for place in range(len(calls))]
        return self._joined(parts, more=first > 0)

    def _parts(self, ordinals: Sequence[int]) -> list[tuple[int, tuple[int, int], int, int]]:
        """Divide a batch's groups among the workers, as `RolloutWorkers.parts`: neighbours that one of them holds."""
        if (holders := self.groups.holders(ordinals)) is None:  # the journal has them
            return list(self.workers.parts(len(ordinals)))
        begins = [place for place, one in enumerate(holders) if not place or holders[place - 1] != one]
        ends = [*begins[1:], len(holders)]
        count = len(begins)
        return [
            (holders[begin], (part, count), begin, end)
            for part, (begin, end) in enumerate(zip(begins, ends, strict=True), start=1)
        ]

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        """Every worker fills in the files that it wrote."""
        ends = itertools.accumulate(count for _, count in files)
        calls = []
        for file, until in zip(files, ends, strict=True):
            own = outlines[until - file[1] : until]
            calls.append((self._wrote[file[0]], partial(LocalRollouts.fill_rewards, files=[file], outlines=own)))
        if calls:
            self.workers.call(calls, what="filling in rewards")

    def update_weights(self, weights: Weights, version: int, *, in_flight: bool = False) -> SyncReport:
        """The workers read the weights together from the ranks that hold them."""
        self._is_locked = self.needs_weights = False
        joins = self.workers.join()
        self.workers.weights = weights, version
        if isinstance(weights.read, WeightReader):
            weights = replace(weights, read=replace(weights.read, readers=len(self.workers.living)))
        update = partial(LocalRollouts.update_weights, weights=weights, version=version, in_flight=in_flight)
        reports = self.workers.broadcast(update)
        if joins:
            self._join()
        return SyncReport(
            sum(report.bytes for report in reports), max((report.seconds for report in reports), default=0.0)
        )

    def sleep(self) -> None:
        if self.config.actor_rollout_ref.rollout.free_cache_engine:
            self.workers.broadcast(LocalRollouts.sleep)
            self.needs_weights = True

    def metrics(self) -> Metrics:
        """Merge the metrics of all workers by their kinds. See `RolloutRunner.metrics`."""
        return Metrics.merged(self.workers.broadcast(LocalRollouts.metrics))

    def checked(self) -> Report:
        """Join the reports of all workers. See `RolloutRunner.checked`."""
        found = Report()
        for report in self.workers.broadcast(LocalRollouts.checked):
            found.add(report)
        return found

    def restart_workers(self) -> None:
        self.workers.restart_dead()

    def replace_dead_workers(self) -> None:
        self.groups.replace_dead_workers()

    async def run_group(
        self, work: PromptTask, on_begin: Callable[[int], None], on_end: Callable[[], None], log: Log | None
    ) -> EndedGroup:
        """The group runs in the worker that has fewest."""
        return await self.groups.run(work, on_begin, on_end, log)

    async def stop_groups(self) -> None:
        await self.groups.stop()

    async def pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            await self.groups.broadcast(partial(_on_loop, LocalRollouts.pause))

    async def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            await self.groups.broadcast(partial(_on_loop, LocalRollouts.resume))

    async def lock_weights(self) -> None:
        self._is_locked = True
        await self.groups.broadcast(partial(_on_loop, LocalRollouts.lock_weights))

    async def unlock_weights(self, weights: Weights, version: int) -> None:
        """A worker that takes another's place is sent these."""
        self.workers.weights, self._is_locked = (weights, version), False
        unlock = partial(LocalRollouts.unlock_weights, weights=weights, version=version)
        await self.groups.broadcast(partial(_on_loop, unlock))

    async def idle_seconds(self) -> float:
        """Idle seconds that the workers have reported so far."""
        return self.groups.idle_seconds

    @contextmanager
    def observed(self, task: Task, total: int | None) -> Iterator[Callable[[], None]]:
        with self.display.stage(task.name, total=total) as stage:
            yield partial(stage.advance, 1)

    def close(self) -> None:
        """End all workers."""
        self.workers.close()
        self.loop.close()

    def _joined(self, parts: Sequence[RolloutPart], *, more: bool = False) -> Rollout:
        """Join the workers' parts of a rollout, and note who wrote its files; `more`: of others of the step, too."""
        before = self._wrote if more else {}
        self._wrote = before | {path: worker for rollout, worker in parts for path, _ in rollout.files}
        return Rollout.joined([rollout for rollout, _ in parts])

    def _join(self) -> None:
        """Bring new workers to the state of the others, and give them groups."""
        self.loop.run(self._repeat_calls())

    async def _repeat_calls(self) -> None:
        if self._is_locked:
            await self.groups.broadcast(partial(_on_loop, LocalRollouts.lock_weights))
        if self._is_paused:
            await self.groups.broadcast(partial(_on_loop, LocalRollouts.pause))
        await self.groups.follow()


def _on_loop(work: Callable[[LocalRollouts], Coroutine[object, None, None]], rollouts: LocalRollouts) -> None:
    """Await `work` on the event loop of a worker's rollouts."""
    rollouts.loop.run(work(rollouts))
