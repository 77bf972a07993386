"""Rollouts in processes of their own under Ray, one on each node: the tokens that they make stay in the object store.

A rollout worker keeps no state that is not sent to it again. When one dies, its replacement is given the weights and
repeats its part of the step. Where a subclass lets a new worker start while the others continue, another does that
part.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentrl.checks.report import Report
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import ConfigError, WorkerDied
from agentrl.observe.display import Display, Stage
from agentrl.remote.router import ServerAccess
from agentrl.rollouts.context import FirstRows
from agentrl.rollouts.contract import Rollout, Task
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.objects import UserObjects
from agentrl.rollouts.ray_worker import News, RolloutPart, RolloutWorker, Work, run_part
from agentrl.runtime.ray.network import is_gone
from agentrl.runtime.ray.pool import ROOM_WITHIN, WeightReader, ask, end, placed, raised
from agentrl.runtime.ray.rank import Failure, Place
from agentrl.runtime.ray.session import Surroundings, death_of
from agentrl.runtime.ray.stored import StoredBatch
from agentrl.runtime.ray.watch import GONE
from agentrl.runtime.stall import Stall
from agentrl.system.metrics import Metrics
from agentrl.trajectory import Outline
from agentrl.trajectory.sample import Sample

if TYPE_CHECKING:
    from ray.actor import ActorProxy

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Placing = dict[str, float | NodeAffinitySchedulingStrategy | PlacementGroupSchedulingStrategy]
"""Options of an actor that say where it runs."""
LOOK_EVERY = 0.25
"""Seconds between two looks at how far the workers are."""
ROOM_TOLD = 5.0
"""Seconds after which the user is warned that a worker waits for a machine."""
SILENT_TOLD, SILENT_FOR = 60.0, 600.0
"""Seconds without an answer to a call that workers answer at once: until the user is warned, and until the worker
counts as dead."""
SILENT = "it is stopped, unreachable, or in native code that lets no other thread run"
CLOSED_WITHIN = 30.0
"""Seconds that a worker has to end its rollouts, or its servers and tools."""


class SharedWork(Protocol[T_co]):
    """Work that gives each worker its samples, the position of the first, and the name of its file."""

    def __call__(self, rollouts: LocalRollouts, /, *, task: Task, samples: Sequence[Sample], first: int) -> T_co: ...


@dataclass(slots=True)
class Starting:
    """A worker that takes another's place, and that nothing waits for while it starts."""

    call: ray.ObjectRef[object]
    """Answered when it has."""
    begun: float = field(default_factory=time.monotonic)
    is_told: bool = False
    """True where the user was warned that no machine has room for it."""


class RayRollouts:
    """`RolloutRunner` over all workers.

    Where one dies, all wait until a new one has taken its place.

    Args:
        nodes: names the Ray nodes; on each, one worker shares the devices with the policy. They change where ranks
            restart on other machines. None: devices of their own, as rollout.nnodes and rollout.n_gpus_per_node say.
        first: rows on which the first worker tries scorers and interactions; all workers have the same ones.
        servers: the servers of a generative reward model.
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
        """Raises ConfigError when the cluster has no room, and every error that keeps a worker from starting."""
        self.config, self.device, self.run_dir, self.display = config, device, run_dir.absolute(), display
        try:
            self._objects = ray.put(objects)
        except Exception as error:  # whatever an object's own pickling raises
            raise ConfigError(
                "loops, tools, interactions and the reward function are copied to Ray's workers, and one of them "
                f"cannot be pickled: {type(error).__name__}: {error}\nHave it open what it needs in its start(run), or "
                "name it in the config, so that each worker makes its own"
            ) from error
        self._first, self._servers = first, servers
        self.needs_weights = False
        """See `RolloutRunner.needs_weights`."""
        self._restarts = config.trainer.max_worker_restarts
        self._nodes = nodes
        self._groups = [] if nodes is not None else self._placed()
        self._count = len(self._groups) if nodes is None else len(nodes())
        self._places: dict[int, Place] = {}
        """Processes and machines of the workers that have started, by their numbers."""
        self._weights: tuple[Weights, int] | None = None
        self._actors: list[ActorProxy[RolloutWorker]] = []
        self._starting: dict[int, Starting] = {}
        """By number: idle workers, which get no call yet while others continue."""
        self._wrote: dict[Path, int] = {}
        """Numbers of the workers that wrote the newest rollout's files."""
        self._done = [0] * self._count
        self._asked_news: dict[ray.ObjectRef[News], tuple[int, Stall]] = {}
        """Unanswered calls, by worker: a worker hands out its news with an answer, so no call may be dropped."""
        try:
            self._actors = [self._actor(number) for number in range(self._count)]
            with display.stage("start rollout workers"):
                self._open()
        except BaseException:
            self.close()
            raise

    def run(self, task: Task, samples: Sequence[Sample], first: int = 0, *, show: bool = False) -> Rollout:
        """See `RolloutRunner.run`. The batches are stored ones."""
        return self._joined(self._shared(partial(run_part, show=show), task, samples, first))

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        """See `RolloutRunner.fill_rewards`. Every worker fills in the files that it wrote."""
        ends = itertools.accumulate(count for _, count in files)
        calls = []
        for file, until in zip(files, ends, strict=True):
            own = outlines[until - file[1] : until]
            calls.append((self._wrote[file[0]], partial(LocalRollouts.fill_rewards, files=[file], outlines=own)))
        if calls:
            self._call(calls, what="filling in rewards")

    def update_weights(self, weights: Weights, version: int, *, in_flight: bool = False) -> SyncReport:
        """See `RolloutRunner.update_weights`. The workers read the weights together from the ranks that hold them."""
        self._weights = weights, version
        self.needs_weights = False
        if isinstance(weights.read, WeightReader):
            weights = replace(weights, read=replace(weights.read, readers=len(self._living())))
        update = partial(LocalRollouts.update_weights, weights=weights, version=version, in_flight=in_flight)
        reports = self._everyone(update)
        return SyncReport(
            sum(report.bytes for report in reports), max((report.seconds for report in reports), default=0.0)
        )

    def rest(self) -> None:
        """See `RolloutRunner.rest`."""
        if self.config.actor_rollout_ref.rollout.free_cache_engine:
            self._everyone(LocalRollouts.rest)
            self.needs_weights = True

    def metrics(self) -> Metrics:
        """Merge the metrics of all workers by their kinds. See `RolloutRunner.metrics`."""
        return Metrics.merged(self._everyone(LocalRollouts.metrics))

    def checked(self) -> Report:
        """Join the reports of all workers. See `RolloutRunner.checked`."""
        joined = Report()
        for report in self._everyone(LocalRollouts.checked):
            joined.add(report)
        return joined

    def revive(self) -> None:
        """See `RolloutRunner.revive`."""
        self._weights = None
        for number in self._living():
            try:
                self._pass_on(number, ray.get(self._actors[number].news.remote()), None)
            except GONE as error:
                self._replace(number, f"rollout worker {number + 1} died: {death_of(error)}")

    def close(self) -> None:
        opened = [actor for number, actor in enumerate(self._actors) if number not in self._starting]
        closing = [ask(actor, RolloutWorker.close) for actor in opened]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSED_WITHIN)
        for actor in self._actors:
            end(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups = [], []

    def _shared(self, work: SharedWork[T], task: Task, samples: Sequence[Sample], first: int) -> list[T]:
        """`work(rollouts, task=..., samples=..., first=...)` on every worker, each with its part."""
        calls = [
            (number, partial(work, task=replace(task, share=share), samples=samples[start:end], first=first + start))
            for number, share, start, end in self._parts(len(samples))
        ]
        with self.display.stage(task.name, total=len(samples) * task.each) as stage:
            return self._call(calls, what=task.name, stage=stage)

    def _parts(self, count: int) -> Iterator[tuple[int, tuple[int, int], int, int]]:
        """Divide `count` things among the workers: (number of the worker, (part, parts), start, end)."""
        living = self._living()
        bounds = [count * part // len(living) for part in range(len(living) + 1)]
        for part, number in enumerate(living):
            yield number, (part + 1, len(living)), bounds[part], bounds[part + 1]

    def _living(self) -> list[int]:
        """Return the numbers of the workers that are not just starting in another's place."""
        return [number for number in range(self._count) if number not in self._starting]

    def _joined(self, parts: Sequence[RolloutPart]) -> Rollout:
        """Join the workers' parts of a rollout, and note who wrote its files."""
        self._wrote = {path: part.worker for part in parts for path, _ in part.files}
        return joined(parts)

    def _everyone(self, work: Work[T]) -> list[T]:
        """Call all workers that live. A worker that dies and is not replaced at once gives no answer."""
        what = getattr(work, "func", work).__name__
        return self._call([(number, work) for number in self._living()], what=what, moves=False)

    def _call(
        self, works: Sequence[tuple[int, Work[T]]], *, what: str, stage: Stage | None = None, moves: bool = True
    ) -> list[T]:
        """Have workers, by number, do their work, and return the answers. A worker that dies is replaced, and its
        replacement is asked. While the replacement starts, another worker is asked if the work `moves`; otherwise the
        work waits.

        Raises the error of a worker, and WorkerDied when one died once more than trainer.max_worker_restarts allows;
        the others' work is ended then.
        """
        answers: dict[int, T] = {}
        running: dict[ray.ObjectRef[T | Failure], tuple[int, int, ActorProxy[RolloutWorker]]] = {}
        """Position of the work, and number and process of the worker that does it."""

        def begin(place: int) -> None:
            number, work = works[place]
            if number in self._starting:
                if not moves:
                    return
                living = self._living()
                number = living[place % len(living)]
            actor = self._actors[number]
            running[ask(actor, RolloutWorker.call, work)] = place, number, actor

        try:
            for place in range(len(works)):
                begin(place)
            while running:
                for call in ray.wait(list(running), num_returns=len(running), timeout=LOOK_EVERY)[0]:
                    place, number, actor = running.pop(call)
                    try:
                        answers[place] = answer_of(call, f"rollout worker {number + 1} of {self._count}, {what}")
                    except GONE as error:
                        if self._actors[number] is actor:  # else another of its calls has told of it
                            self._replace(number, f"rollout worker {number + 1} died in {what}: {death_of(error)}")
                        begin(place)
                self._tell(stage)
        except BaseException:  # Ctrl-C among them
            self._stop([actor for _, _, actor in running.values()], list(running))
            raise
        return [answers[place] for place in range(len(works)) if place in answers]

    def _stop(self, busy: Sequence[ActorProxy[RolloutWorker]], calls: list[ray.ObjectRef[T | Failure]]) -> None:
        """Cancel the work of the workers that still do it, and wait for them."""
        for actor in busy:
            actor.stop.remote()
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=CLOSED_WITHIN)

    def _tell(self, stage: Stage | None) -> None:
        """Pass on the workers' news for the display."""
        busy = {number for number, _ in self._asked_news.values()}
        for number in self._living():
            if number not in busy:
                self._asked_news[self._actors[number].news.remote()] = number, Stall(SILENT_TOLD, SILENT_FOR)
        asked = list(self._asked_news)
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_EVERY)
        for call in ready:
            number, _ = self._asked_news.pop(call)
            try:
                self._pass_on(number, ray.get(call), stage)
            except GONE:
                continue  # told where its answer is waited for
        for number, stall in self._asked_news.values():
            if stall.due():
                self.display.warn(f"rollout worker {number + 1} has not answered for {stall.seconds:.0f} s: {SILENT}")
            if stall.over:
                end(self._actors[number])

    def _pass_on(self, number: int, news: News, stage: Stage | None) -> None:
        for text in news.notes:
            self.display.note(text)
        for text in news.warnings:
            self.display.warn(text)
        if stage is not None:
            stage.advance(news.done - self._done[number])
        self._done[number] = news.done

    def _make_anew(self, number: int, death: str, meanwhile: str = "") -> None:
        """Replace a worker that died, and warn the user. Raises WorkerDied where no replacement is allowed.

        meanwhile: text about the work that continues while it starts.
        """
        if self._restarts == 0:
            raise WorkerDied(death)
        self._restarts -= 1
        place = self._places.pop(number, None)
        if place is not None and self._weights is not None and isinstance(self._weights[0].read, WeightReader):
            self._weights[0].read.check(place)
        if place is not None and is_gone(place.node):
            death = f"{death}, and its machine is gone"
            if self._nodes is not None and place.node in self._nodes():  # so are the ranks that were there
                raise WorkerDied(death)
        self.display.warn(f"{death}; a new one takes its place{meanwhile}")
        end(self._actors[number])  # an answer that is lost with its machine does not say that the process is dead
        self._actors[number], self._done[number] = self._actor(number), 0
        self._asked_news = {call: other for call, other in self._asked_news.items() if other[0] != number}

    def _replace(self, number: int, death: str) -> None:
        """Replace a worker that died, and send the new worker the weights that the others have."""
        self._make_anew(number, death)
        try:
            self._find_room(number)
            self._start(number, self._opened(number))
            self._give_weights(number)
        except GONE as error:
            self._replace(number, f"rollout worker {number + 1} died at its start: {death_of(error)}")

    def _start(self, number: int, opening: ray.ObjectRef[object]) -> None:
        """Wait until a worker has opened. Raises the error that it met, or one of `GONE`."""
        answer_of(opening, f"rollout worker {number + 1} of {self._count}, its start")
        self._places[number] = ray.get(self._actors[number].place.remote())

    def _give_weights(self, number: int) -> None:
        if self._weights is not None:
            weights, version = self._weights
            update = partial(LocalRollouts.update_weights, weights=weights, version=version)
            call = ask(self._actors[number], RolloutWorker.call, update)
            answer_of(call, f"rollout worker {number + 1}, its start")

    def _find_room(self, number: int) -> None:
        """Wait until a machine has room for a worker that takes another's place. Raises WorkerDied."""
        if self._nodes is not None:
            return  # beside a rank, which has found room
        begun, is_told = time.monotonic(), False
        while not self._groups[number].wait(1.0):  # in short pieces, for it cannot be interrupted
            waited = time.monotonic() - begun
            if waited > ROOM_WITHIN:
                raise WorkerDied(f"rollout worker {number + 1}: the cluster had no room for it in {ROOM_WITHIN:g} s")
            if waited > ROOM_TOLD and not is_told:
                is_told = True
                self.display.warn(
                    f"no machine of the cluster has room for rollout worker {number + 1}: the run goes on when one "
                    f"joins (ray start --address=...), and ends after {ROOM_WITHIN:g} s without one"
                )

    def _open(self) -> None:
        """Start all workers' engines and tools at once."""
        running = {self._opened(number): number for number in range(len(self._actors))}
        while running:
            for call in ray.wait(list(running), num_returns=len(running), timeout=LOOK_EVERY)[0]:
                number = running.pop(call)
                try:
                    self._start(number, call)
                except GONE as error:
                    self._replace(number, f"rollout worker {number + 1} died in its start: {death_of(error)}")
            self._tell(None)

    def _opened(self, number: int) -> ray.ObjectRef[object]:
        """Ask a worker to start its engine and tools; the call."""
        count = self._count
        part = part_of(self.config, number, count)
        objects = cast(UserObjects, self._objects)  # Ray hands over what the reference refers to
        share, first = (number + 1, count), self._first if number == 0 else FirstRows()
        worker, servers = self._actors[number], self._servers
        return ask(worker, RolloutWorker.open, part, self.device, self.run_dir, share, objects, first, servers)

    def _actor(self, number: int) -> ActorProxy[RolloutWorker]:
        variables = {
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "OMP_WAIT_POLICY": "PASSIVE",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without GPUs of its own it sees all of the machine
        }
        kind = ray.remote(concurrency_groups={"news": 1, "groups": 1})(RolloutWorker)  # type: ignore[call-overload]
        options = kind.options(runtime_env={"env_vars": variables}, **self._placing(number))
        actor: ActorProxy[RolloutWorker] = options.remote(Surroundings.here())
        return actor

    def _placing(self, number: int) -> Placing:
        """Return Ray's placement options for a worker."""
        if self._nodes is not None:
            # Where the ranks have all CPUs of a machine, a worker that asks for one would never start.
            return {
                "num_cpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(self._nodes()[number], soft=False),
            }
        return {
            "num_cpus": 1,
            "num_gpus": float(self.config.actor_rollout_ref.rollout.n_gpus_per_node) if self.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[number], placement_group_bundle_index=0
            ),
        }

    def _placed(self) -> list[PlacementGroup]:
        """Find room for workers with devices of their own. Raises ConfigError when the cluster has no room."""
        rollout = self.config.actor_rollout_ref.rollout
        gpus = {"GPU": float(rollout.n_gpus_per_node)} if self.device == "cuda" else {}
        return placed(
            [[{"CPU": 1.0, **gpus}]] * rollout.nnodes,
            f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} rollout workers"
            + (f" with {rollout.n_gpus_per_node} GPUs each" if gpus else ""),
        )


def answer_of(call: ray.ObjectRef[T | Failure], worker: str) -> T:
    """Wait for a worker's answer. Raises the error that it met, or one of `GONE`."""
    answer = ray.get(call)
    if isinstance(answer, Failure):
        raise raised(answer, worker)
    return answer


def joined(parts: Sequence[RolloutPart]) -> Rollout:
    """Join the workers' parts of a rollout, in order."""
    batches = [part.batch for part in parts if part.batch is not None]
    read = [part.conversations for part in parts if part.conversations is not None]
    return Rollout(
        list(itertools.chain.from_iterable(part.outlines for part in parts)),
        StoredBatch.of(batches) if batches else None,
        next((part.shown for part in parts if part.shown is not None), None),
        StoredBatch.of(read) if read else None,
        list(itertools.chain.from_iterable(part.files for part in parts)),
        list(itertools.chain.from_iterable(part.whole for part in parts)),
    )


def part_of(config: RolloutsConfig, number: int, count: int) -> RolloutsConfig:
    """Return the config of one of `count` workers, with its share of the servers and of the run's limits."""

    def share(limit: float | None) -> float | None:
        return limit if limit is None else limit / count if isinstance(limit, float) else -(-limit // count)

    roles, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    urls = None if rollout.server_urls is None else rollout.server_urls[number::count]
    agent = rollout.agent.model_copy(update={"max_concurrent": share(rollout.agent.max_concurrent)})
    tools = {name: share(getattr(config.tools, name)) for name in ("max_concurrent", "max_rate")}
    scoring = config.reward_model
    reward = {"max_concurrent": share(scoring.max_concurrent)} | {
        name: asked.model_copy(update={"max_concurrent": share(asked.max_concurrent)})
        for name, asked in (("sandbox_fusion", scoring.sandbox_fusion), ("judge", scoring.judge))
    }
    return config.model_copy(
        update={
            "actor_rollout_ref": roles.model_copy(
                update={"rollout": rollout.model_copy(update={"server_urls": urls, "agent": agent})}
            ),
            "tools": config.tools.model_copy(update=tools),
            "reward_model": config.reward_model.model_copy(update=reward),
        }
    )
