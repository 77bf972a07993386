"""Trajectories for a step: samples in, finished and scored trajectories out, as a batch and in outline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from agentrl.agent_loop import Request, Scheduler
from agentrl.agent_loop.limits import seed_of
from agentrl.config import Config
from agentrl.config.sections.rollout import RolloutConfig, ValKwargs
from agentrl.engines.contract import EngineError, RolloutEngine, SamplingParams
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import CodeError, TrainingError
from agentrl.reward.model_input import ModelInput, conversations
from agentrl.system.throttle import OncePerKey
from agentrl.system.user_code import collect_numbers
from agentrl.trajectory import Outline, Trajectory
from agentrl.trajectory.batch import Sequences
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.parquet import fill_rewards, write_trajectories
from agentrl.trajectory.sample import Sample

STALL_SECONDS = 30.0
GREEDY = SamplingParams(1, temperature=0.0)


class Progress(Protocol):
    """A stretch of work that tells how far it is."""

    def advance(self, count: int = 1) -> None: ...


class Audience(Protocol):
    """Who is told how rollouts go on: the display, or in another process what passes it on to the display."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Progress]: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """What trajectories came to."""

    outlines: list[Outline]
    """All of them, in the order of the prompts."""
    batch: Sequences | None = None
    """What can be trained on; None where nothing is to be."""
    shown: Trajectory | None = None
    """One of them, whole, where one was asked for."""
    conversations: Sequences | None = None
    """What the reward model reads of those that can be trained on, where there is one."""
    files: list[tuple[Path, int]] = field(default_factory=list)
    """Where they were written, and how many of the outlines are in each file, in order."""


@dataclass(frozen=True, slots=True)
class Task:
    """Which trajectories are asked for."""

    name: str
    """As the display shows it."""
    n: int
    """Trajectories of each prompt."""
    params: SamplingParams
    tag: str
    """What their ids begin with."""
    seeds: str
    """What their seeds depend on, beside trainer.seed, prompt and number."""


def training(config: Config, step: int) -> Task:
    """n sampled trajectories a prompt."""
    rollout = config.actor_rollout_ref.rollout
    return Task("rollout", rollout.n, _sampled(rollout), f"train/{step}", f"train/{step}")


def validation(config: Config, step: int, *, greedy: bool) -> Task:
    """Greedy: one trajectory a prompt; else val_kwargs.n sampled ones, in every validation by the same seeds."""
    if greedy:
        return Task("validate (greedy)", 1, GREEDY, f"greedy/{step}", "greedy")
    val = config.actor_rollout_ref.rollout.val_kwargs
    return Task("validate (sampled)", val.n, _sampled(val), f"val/{step}", "val")


def responses(config: Config, *, greedy: bool) -> Task:
    """n sampled trajectories a prompt, or one greedy one."""
    rollout = config.actor_rollout_ref.rollout
    n, params = (1, GREEDY) if greedy else (rollout.n, _sampled(rollout))
    return Task("responses", n, params, "generate", "generate")


class Rollouts:
    """Runs the scheduler on `runner`, the event loop on which it and the engine live.

    Args:
        record_dir: where trajectories are written.
        share: which of how many processes this is that write theirs.
        reading: makes what the reward model reads, where there is one.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        engine: RolloutEngine,
        runner: asyncio.Runner,
        audience: Audience,
        record_dir: Path,
        share: tuple[int, int] = (1, 1),
        reading: ModelInput | None = None,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.engine = engine
        self.audience = audience
        self.runner = runner
        self.record_dir = record_dir
        self.share = share
        self.reading = reading
        self.turn_reward_coef = config.algorithm.turn_reward_coef
        self.resting = False
        """The engine's memory is lent to the policy."""
        self._going_on: asyncio.Task[Any] | None = None
        self._once = OncePerKey()

    def train(self, samples: Sequence[Sample], step: int, *, show: bool = False, first: int = 0) -> Rollout:
        """See `training`. The trajectories are in the order of the prompts, which are counted from `first`."""
        task = training(self.config, step)
        trajectories = self._run(samples, task, first)
        rollout = self._kept(trajectories, "train", step, "", show, first * task.n)
        batch = from_trajectories(trajectories, turn_reward_coef=self.turn_reward_coef, first=first * task.n)
        return replace(rollout, batch=batch)

    def validate(
        self,
        samples: Sequence[Sample],
        step: int,
        *,
        greedy: bool,
        show: bool = False,
        first: int = 0,
        file: int | None = None,
    ) -> Rollout:
        """See `validation`. Prompts are counted from `first`; `file`: the first one of all processes' parts."""
        task = validation(self.config, step, greedy=greedy)
        begins = first if file is None else file
        part = f"_{'greedy' if greedy else 'sampled'}" + (f"_{begins:06d}" if begins else "")
        return self._kept(self._run(samples, task, first), "val", step, part, show, first * task.n)

    def generate(self, samples: Sequence[Sample], *, greedy: bool, first: int) -> list[Trajectory]:
        """See `responses`. Prompts are counted from `first`, and each has its own seeds."""
        return self._run(samples, responses(self.config, greedy=greedy), first)

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        """Write what the reward model made of rewards into the files of a rollout, whose outlines these are."""
        done = 0
        for path, count in files:
            if path.exists():
                fill_rewards(path, outlines[done : done + count], self.turn_reward_coef)
            else:  # a worker that took another's place may be on another machine
                self.audience.warn(f"{path} is not on this machine: the reward model's part is missing in it")
            done += count

    def sync_weights(self, weights: Weights, version: int) -> SyncReport:
        """Give the engine the policy's weights, and its memory back. Raises TrainingError when it cannot take them."""
        try:
            report = self.runner.run(self.engine.update_weights(weights, version))
            if self.resting:
                self.runner.run(self.engine.wake())
                self.resting = False
        except EngineError as error:
            raise TrainingError(f"weights of step {version}: {error}") from error
        return report

    def rest(self) -> None:
        """Lend the engine's memory to the policy until `sync_weights`, where they share a device."""
        if self.config.actor_rollout_ref.rollout.free_cache_engine:
            self.runner.run(self.engine.sleep())
            self.resting = True

    def metrics(self) -> dict[str, float]:
        """The engine's own numbers, and those of tools, interactions and scorers since they were last asked for."""
        health = self.runner.run(self.engine.health()).metrics
        metrics = {f"engine/{name}": value for name, value in health.items()}
        context = self.scheduler.context
        metrics |= context.tools.take_metrics(self._meet)
        for name, interaction in context.interactions.items():
            numbers = collect_numbers(f"interaction {name}", interaction.take_metrics, self._meet)
            metrics |= {f"interaction/{name}/{key}": value for key, value in numbers.items()}
        if self.scheduler.reward is not None:
            metrics |= self.scheduler.reward.take_metrics()
        return metrics

    def _meet(self, error: CodeError) -> None:
        """Raise it, or tell it, once a place; see `rollout.agent.on_code_error`."""
        if self.config.actor_rollout_ref.rollout.agent.on_code_error == "error":
            raise error
        if self._once(error.place or error.summary):
            self.audience.warn(f"{error}\n  Its numbers are left out")

    def stop(self) -> None:
        """From any thread: whoever waits for trajectories gets CancelledError in their place."""
        task = self._going_on
        if task is not None:
            self.runner.get_loop().call_soon_threadsafe(task.cancel)

    def revive(self) -> None:
        """Nothing can die here but the run itself."""

    def _kept(
        self, trajectories: list[Trajectory], split: str, step: int, part: str, show: bool, first: int
    ) -> Rollout:
        """What is to be known of trajectories, after they were written to the disk."""
        read = None if self.reading is None else conversations(trajectories, self.reading, first)
        rollout = Rollout(
            [trajectory.outline() for trajectory in trajectories],
            shown=next((trajectory for trajectory in trajectories if trajectory.transcripts), None) if show else None,
            conversations=read,
        )
        if self.config.trainer.save_trajectories in ("all", split):
            path = write_trajectories(
                self.record_dir,
                trajectories,
                step=step,
                split=split,
                part=part,
                share=self.share,
                turn_reward_coef=self.turn_reward_coef if self.reading is None else None,
            )
            rollout.files.append((path, len(trajectories)))
        return rollout

    def _run(self, samples: Sequence[Sample], task: Task, first: int) -> list[Trajectory]:
        requests = [
            Request(
                uid=f"{task.tag}/{group}/{k}",
                group=group,
                sample=sample,
                params=task.params,
                seed=seed_of(self.config.trainer.seed, task.seeds, group, k),
                count_drift=k == 0,
            )
            for group, sample in enumerate(samples, first)
            for k in range(task.n)
        ]
        return self.runner.run(self._run_all(requests, task.name))

    async def _run_all(self, requests: list[Request], title: str) -> list[Trajectory]:
        with self.audience.stage(title, total=len(requests)) as stage:
            ended = 0

            def on_end(trajectory: Trajectory) -> None:
                nonlocal ended
                ended += 1
                stage.advance(1)

            watch = asyncio.create_task(self._watch(lambda: ended, title))
            self._going_on = asyncio.current_task()
            try:
                trajectories = await self.scheduler.run(requests, on_end)
            finally:
                self._going_on = None
                watch.cancel()
        cassette = self.scheduler.context.tools.cassette
        if cassette is not None:
            cassette.check()
        if self.config.actor_rollout_ref.rollout.agent.on_code_error == "error":
            self.scheduler.context.tools.check()
        return trajectories

    async def _watch(self, ended: Callable[[], int], title: str) -> None:
        """Say what a stalled rollout waits for."""
        before = -1
        while True:
            await asyncio.sleep(STALL_SECONDS)
            if ended() == before:
                waiting = ", ".join(f"{count} for {what}" for what, count in self.scheduler.waiting_for().items())
                self.audience.warn(
                    f"{title}: no trajectory ended in {STALL_SECONDS:g} s; waiting: {waiting or 'scoring'}"
                )
            before = ended()


def _sampled(keys: RolloutConfig | ValKwargs) -> SamplingParams:
    return SamplingParams(1, temperature=keys.temperature, top_p=keys.top_p, top_k=keys.top_k)
