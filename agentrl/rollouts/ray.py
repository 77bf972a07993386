"""Rollouts in processes of their own under Ray, one on each node: the tokens that they make stay in the object store.

A rollout worker keeps nothing that is not sent to it again: when one dies, a new one is given the weights and does its
part of the step anew.
"""

from __future__ import annotations

import itertools
import os
from asyncio import CancelledError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentrl.config import Config
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import WorkerDied
from agentrl.observe.display import Display, Stage
from agentrl.rollouts.local import Rollout, Rollouts, Task, responses, training, validation
from agentrl.runtime.ray.pool import WeightReader, placed, raised
from agentrl.runtime.ray.rank import Failure
from agentrl.runtime.ray.session import death_of, work_in
from agentrl.runtime.ray.stored import Index, StoredBatch, put_batch
from agentrl.runtime.ray.watch import GONE
from agentrl.trajectory import Outline, Trajectory
from agentrl.trajectory.sample import Sample

LOOK_EVERY = 0.25
"""Seconds between two looks at how far the workers are."""
CLOSED_WITHIN = 30.0
"""Seconds that a worker has to end its rollouts, or its servers and tools."""


@dataclass(slots=True)
class News:
    """What a worker has to tell since it was last asked."""

    notes: list[str]
    warnings: list[str]
    done: int
    """Units of all stages so far."""


class Relay:
    """In a rollout worker: keeps what is meant for the display until the driver asks for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._news = News([], [], 0)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Relay]:
        yield self

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self._news.done += count

    def note(self, text: str) -> None:
        with self._lock:
            self._news.notes.append(text)

    def warn(self, text: str) -> None:
        with self._lock:
            self._news.warnings.append(text)

    def take(self) -> News:
        with self._lock:
            news, self._news = self._news, News([], [], self._news.done)
        return news


class RolloutWorker:
    """A Ray actor around `Rollouts`. Every method returns what the driver is to see: a value, or a Failure."""

    def __init__(self, folder: str) -> None:
        work_in(folder)
        self.relay = Relay()
        self.stack = ExitStack()
        self.rollouts: Rollouts

    def open(self, config: Config, device: str, run_dir: Path, share: tuple[int, int]) -> Failure | None:
        """Start engine and tools."""
        from agentrl.rollouts.build import open_local_rollouts
        from agentrl.rollouts.context import build_tools, load_chat

        try:
            chat = load_chat(config)
            scored = getattr(config.data, "output_scores", True)
            context = build_tools(config, chat, scored=scored)
            opened = open_local_rollouts(config, device, chat, context, run_dir, self.relay, share)
            self.rollouts = self.stack.enter_context(opened)
        except Exception as error:
            return Failure.of(error)
        return None

    def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A method of the rollouts. Of a Rollout: what `joined` takes, with an `Index` for a batch, which is stored."""
        try:
            value = getattr(self.rollouts, method)(*arguments, **keywords)
            if isinstance(value, Rollout):
                stored = [
                    None if part is None else put_batch(part.load()) for part in (value.batch, value.conversations)
                ]
                return value.outlines, *stored, value.shown, value.files
        except (Exception, CancelledError) as error:
            return Failure.of(error)
        return value

    @ray.method(concurrency_group="news")
    def news(self) -> News:
        return self.relay.take()

    @ray.method(concurrency_group="news")
    def stop(self) -> None:
        """End the rollouts that are going on, if there are any."""
        self.rollouts.stop()

    def close(self) -> None:
        self.stack.close()


class RayRollouts:
    """As `Rollouts`, whose methods it has, over all workers.

    Args:
        nodes: the Ray nodes on which a worker each shares the devices with the policy; None: devices of their own, as
            rollout.nnodes and rollout.n_gpus_per_node say.
    """

    def __init__(
        self, config: Config, device: str, run_dir: Path, display: Display, nodes: Sequence[str] | None
    ) -> None:
        """Raises ConfigError when the cluster has no room, and whatever keeps a worker from starting."""
        self.config, self.device, self.run_dir, self.display = config, device, run_dir.absolute(), display
        self.resting = False
        """The engines' memory is lent to the policy."""
        self._restarts = config.trainer.max_worker_restarts
        self._groups: list[PlacementGroup] = []
        self._places = self._placed(nodes)
        self._weights: tuple[Weights, int] | None = None
        self._actors: list[Any] = []
        self._done = [0] * len(self._places)
        self._asked_news: dict[Any, int] = {}
        """What is not answered yet: a worker takes its news out when it answers, so nothing asked may be dropped."""
        try:
            self._actors = [self._actor(number) for number in range(len(self._places))]
            with display.stage("start rollout workers"):
                self._asked("open", self._openings(), what="its start")
        except BaseException:
            self.close()
            raise

    def train(self, samples: Sequence[Sample], step: int, *, show: bool = False) -> Rollout:
        return joined(self._shared(training(self.config, step), "train", samples, step, show=show))

    def validate(
        self, samples: Sequence[Sample], step: int, *, greedy: bool, show: bool = False, first: int = 0
    ) -> Rollout:
        task = validation(self.config, step, greedy=greedy)
        keywords = {"greedy": greedy, "show": show, "file": first}
        return joined(self._shared(task, "validate", samples, step, first=first, **keywords))

    def generate(self, samples: Sequence[Sample], *, greedy: bool, first: int) -> list[Trajectory]:
        task = responses(self.config, greedy=greedy)
        answers = self._shared(task, "generate", samples, first=first, greedy=greedy)
        return list(itertools.chain.from_iterable(answers))

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        """Every worker fills in the file that it wrote."""
        ends = list(itertools.accumulate(count for _, count in files))
        calls: list[tuple[Any, ...]] = [
            ("fill_rewards", ([file], outlines[end - file[1] : end]), {}) for file, end in zip(files, ends, strict=True)
        ]
        if calls:
            self._asked("call", calls, what="filling in rewards")

    def sync_weights(self, weights: Weights, version: int) -> SyncReport:
        """Every worker reads the weights from the ranks that hold them."""
        self._weights = weights, version
        self.resting = False
        reports: list[SyncReport] = self._everyone("sync_weights", weights, version)
        return SyncReport(sum(report.bytes for report in reports), max(report.seconds for report in reports))

    def rest(self) -> None:
        if self.config.actor_rollout_ref.rollout.free_cache_engine:
            self._everyone("rest")
            self.resting = True

    def metrics(self) -> dict[str, float]:
        """The numbers of all workers together; see `merged`."""
        return merged(self._everyone("metrics"))

    def revive(self) -> None:
        """New workers for those that died while nothing was asked of them."""
        self._weights = None
        for number, actor in enumerate(self._actors):
            try:
                self._pass_on(number, ray.get(actor.news.remote()), None)
            except GONE as error:
                self._replace(number, f"rollout worker {number + 1} died: {death_of(error)}")

    def close(self) -> None:
        closing = [actor.close.remote() for actor in self._actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSED_WITHIN)
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups = [], []

    def _shared(
        self, task: Task, method: str, samples: Sequence[Sample], *arguments: Any, first: int = 0, **keywords: Any
    ) -> list[Any]:
        """A method on every worker, each with its part of the samples."""
        count = len(self._actors)
        bounds = [len(samples) * number // count for number in range(count + 1)]
        calls = [
            (method, (samples[start:end], *arguments), {**keywords, "first": first + start})
            for start, end in itertools.pairwise(bounds)
        ]
        with self.display.stage(task.name, total=len(samples) * task.n) as stage:
            return self._asked("call", calls, what=task.name, stage=stage)

    def _everyone(self, method: str, *arguments: Any) -> list[Any]:
        return self._asked("call", [(method, arguments, {})] * len(self._actors), what=method)

    def _asked(
        self, method: str, calls: Sequence[tuple[Any, ...]], *, what: str, stage: Stage | None = None
    ) -> list[Any]:
        """The workers' answers. One that dies is replaced, and the new one is asked.

        Raises what a worker raised, and WorkerDied when one died once more than trainer.max_worker_restarts allows; the
        others' work is ended then.
        """
        answers: dict[int, Any] = {}
        running = {
            getattr(actor, method).remote(*call): number
            for number, (actor, call) in enumerate(zip(self._actors, calls, strict=True))
        }
        try:
            while running:
                for call in ray.wait(list(running), num_returns=len(running), timeout=LOOK_EVERY)[0]:
                    number = running.pop(call)
                    try:
                        answers[number] = answer_of(call, f"rollout worker {number + 1} of {len(calls)}, {what}")
                    except GONE as error:
                        self._replace(number, f"rollout worker {number + 1} died in {what}: {death_of(error)}")
                        if method == "call":
                            running[self._actors[number].call.remote(*calls[number])] = number
                self._tell(stage)
        except BaseException:  # Ctrl-C among them
            if method == "call":
                self._stop(running)
            raise
        return [answers.get(number) for number in range(len(calls))]

    def _stop(self, running: Mapping[Any, int]) -> None:
        """End the work of those that still do it."""
        for number in running.values():
            self._actors[number].stop.remote()
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=CLOSED_WITHIN)

    def _tell(self, stage: Stage | None) -> None:
        """Pass on what the workers have to tell."""
        busy = set(self._asked_news.values())
        for number, actor in enumerate(self._actors):
            if number not in busy:
                self._asked_news[actor.news.remote()] = number
        asked = list(self._asked_news)
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_EVERY)
        for call in ready:
            number = self._asked_news.pop(call)
            try:
                self._pass_on(number, ray.get(call), stage)
            except GONE:
                continue  # told where its answer is waited for

    def _pass_on(self, number: int, news: News, stage: Stage | None) -> None:
        for text in news.notes:
            self.display.note(text)
        for text in news.warnings:
            self.display.warn(text)
        if stage is not None:
            stage.advance(news.done - self._done[number])
        self._done[number] = news.done

    def _replace(self, number: int, death: str) -> None:
        if self._restarts == 0:
            raise WorkerDied(death)
        self._restarts -= 1
        if self._weights is not None and isinstance(self._weights[0].read, WeightReader):
            self._weights[0].read.check()
        self.display.warn(f"{death}; a new one takes its place")
        ray.kill(self._actors[number])  # an answer that is lost with its machine does not say that the process is dead
        self._actors[number], self._done[number] = self._actor(number), 0
        self._asked_news = {call: other for call, other in self._asked_news.items() if other != number}
        opened = [self._actors[number].open.remote(*self._openings()[number])]
        if self._weights is not None:
            opened.append(self._actors[number].call.remote("sync_weights", self._weights, {}))
        try:
            for call in opened:
                answer_of(call, f"rollout worker {number + 1}, its start")
        except GONE as error:
            self._replace(number, f"rollout worker {number + 1} died at its start: {death_of(error)}")

    def _actor(self, number: int) -> Any:
        variables = {
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "OMP_WAIT_POLICY": "PASSIVE",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without GPUs of its own it sees all of the machine
        }
        worker: Any = ray.remote(concurrency_groups={"news": 1})(RolloutWorker)  # type: ignore[call-overload]
        options = worker.options(runtime_env={"env_vars": variables}, **self._places[number])
        return options.remote(str(Path.cwd()))

    def _openings(self) -> list[tuple[Any, ...]]:
        count = len(self._places)
        return [
            (part_of(self.config, number, count), self.device, self.run_dir, (number + 1, count))
            for number in range(count)
        ]

    def _placed(self, nodes: Sequence[str] | None) -> list[dict[str, Any]]:
        """Ray's options of each worker."""
        if nodes is not None:
            # Where the ranks have all CPUs of a machine, a worker that asks for one would be waited for for ever.
            return [
                {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
                for node in nodes
            ]
        rollout = self.config.actor_rollout_ref.rollout
        gpus = {"GPU": float(rollout.n_gpus_per_node)} if self.device == "cuda" else {}
        self._groups = placed(
            [[{"CPU": 1.0, **gpus}]] * rollout.nnodes,
            f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} rollout workers"
            + (f" with {rollout.n_gpus_per_node} GPUs each" if gpus else ""),
        )
        return [
            {
                "num_cpus": 1,
                "num_gpus": gpus.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            }
            for group in self._groups
        ]


def answer_of(call: Any, worker: str) -> Any:
    """Wait for a worker's answer. Raises the error that it met, or one of `GONE`."""
    answer = ray.get(call)
    if isinstance(answer, Failure):
        raise raised(answer, worker)
    return answer


Answer = tuple[list[Outline], Index | None, Index | None, Trajectory | None, list[tuple[Path, int]]]
"""A worker's part of a rollout."""


def joined(answers: Sequence[Answer]) -> Rollout:
    """The workers' parts of a rollout as one."""
    outlines, batches, read, shown, files = zip(*answers, strict=True)
    return Rollout(
        list(itertools.chain.from_iterable(outlines)),
        None if batches[0] is None else StoredBatch.of(batches),
        next((trajectory for trajectory in shown if trajectory is not None), None),
        None if read[0] is None else StoredBatch.of(read),
        list(itertools.chain.from_iterable(files)),
    )


COUNTED = ("/retries", "/faults", "/fault/", "/breaker_open", "/servers_healthy", "/failovers", "/restarts")
"""Parts of the names of metrics that count something, and are added up."""


def merged(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several workers as one: counts are added up, of anything else it is the mean of those that have it."""
    found: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return {
        name: sum(values) if any(part in name for part in COUNTED) else sum(values) / len(values)
        for name, values in found.items()
    }


def part_of(config: Config, number: int, count: int) -> Config:
    """The config of one of `count` workers: its share of the servers, and of what is limited for the whole run."""

    def share(limit: Any) -> Any:
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
