"""Rollouts in this process: the scheduler and the engine, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from agentrl.agent_loop import LoopContext, LoopLimits, Request, Scheduler
from agentrl.agent_loop.compaction import Compaction
from agentrl.agent_loop.limits import seed_of
from agentrl.agent_loop.observer import Observers, TurnObserver
from agentrl.agent_loop.stopping import load_stop_conditions
from agentrl.agent_loop.teacher_context import load_teacher_context
from agentrl.algorithms.declared import made_columns
from agentrl.algorithms.filtering import load_filter
from agentrl.chat import Chat
from agentrl.config import Config
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.builder import EngineSetting, open_engine
from agentrl.engines.contract import EngineError, InFlightEngine, RolloutEngine
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import CodeError, ConfigError, TrainingError
from agentrl.interaction import Interaction
from agentrl.observe.report import Report
from agentrl.observe.watch import TrajectoryWatch, open_watches
from agentrl.reward.model_input import ModelInput, conversations
from agentrl.rollouts.context import RunContext, run_name, uses_reward_model
from agentrl.rollouts.contract import GREEDY, EndedGroup, Log, PromptTask, Rollout, Task, judge_group
from agentrl.rollouts.journal import Journal, record_of, trajectories_in
from agentrl.rollouts.saving import Saving
from agentrl.rollouts.staleness_scheduler import GroupStatus
from agentrl.rollouts.trial import try_once
from agentrl.runtime.profiler import nvtx_range, profiled, rollout_profile
from agentrl.runtime.stall import watched
from agentrl.system.call_journal import CallJournal, Entry, OnResume, check_on_resume
from agentrl.system.loop_thread import DelayWatch, LoopThread
from agentrl.system.metrics import Metrics
from agentrl.system.reporter import Reporter
from agentrl.system.thread_state import torch_state
from agentrl.system.throttle import OncePerKey
from agentrl.system.user_code import collect_numbers
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Outline, Trajectory, exclusion
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.files import TRAJECTORIES
from agentrl.trajectory.parquet import fill_rewards, write_trajectories
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.staleness import oldest_version

STALL_SECONDS = 30.0
LOOP_SECONDS = 60.0
"""Time for which the event loop may stand still before the user is warned of the place where it is."""


@contextmanager
def open_local_rollouts(
    config: RolloutsConfig,
    device: str,
    chat: Chat,
    context: RunContext,
    run_dir: Path,
    reporter: Reporter,
    share: tuple[int, int] = (1, 1),
) -> Iterator[LocalRollouts]:
    """Start the engine, reach the services of tools and interactions, and close everything at the end. Raises
    UserError."""
    agent = config.actor_rollout_ref.rollout.agent
    with ExitStack() as stack:
        loop = stack.enter_context(LoopThread("rollouts", torch_state()))
        limits = LoopLimits.from_config(config)
        on_resume = on_resume_of(context.tools, context.interactions)

        async def close(observer: TurnObserver) -> None:
            observer.close()

        def close_later(observer: object) -> None:
            stack.callback(lambda: loop.run(close(cast(TurnObserver, observer))))

        observers = Observers.load(agent.observers, run_dir, agent.observer_options, close_later)
        folder = engine_folder(run_dir, share)
        setting = EngineSetting(config, device, limits.max_model_len, folder, chat.decode, reporter)
        rollout = config.actor_rollout_ref.rollout
        engine = open_engine(setting, loop)
        stack.callback(lambda: loop.run(engine.close()))
        stack.callback(lambda: loop.run(context.close()))
        with reporter.stage("reach tools"):
            loop.run(context.start(run_name(config)))
        if config.tools.cassette is None:  # what is recorded or replayed are the calls of trajectories
            n = config.actor_rollout_ref.rollout.n
            loop.run(try_once(context, agent.on_code_error, reporter.warn, n))
        scheduler = Scheduler(
            context=LoopContext(
                *(engine, chat, context.tools, context.interactions, limits, observers, load_teacher_context(config)),
                roles={} if context.roles is None else context.roles.turns,
                stop_conditions=load_stop_conditions(rollout.multi_turn.stop_conditions),
                compaction=Compaction.from_config(rollout.multi_turn.compaction),
            ),
            loops=context.loops,
            reward=context.reward,
            max_concurrent=agent.max_concurrent,
            trajectory_timeout=agent.trajectory_timeout,
            max_retries=agent.max_retries,
            on_code_error=agent.on_code_error,
            warn=reporter.warn,
        )
        context.tools.warn = reporter.warn
        stack.callback(lambda: loop.run(scheduler.close()))
        rollouts = LocalRollouts(config, scheduler, engine, loop, reporter, run_dir / TRAJECTORIES, share)
        rollouts.on_resume = on_resume
        if isinstance(config, Config):
            seen = (one.trajectories(config, scheduler, engine) for one in open_watches(config.trainer.checks.watches))
            rollouts.watches = [one for one in seen if one is not None]
        what = "nothing goes on in the rollouts, whose event loop has stood still for"
        with watched(what, LOOP_SECONDS, reporter.warn, thread=loop.thread, seconds=rollouts.delay.late):
            yield rollouts


def engine_folder(run_dir: Path, share: tuple[int, int]) -> Path:
    """Return the folder of an engine's files: workers that have the run's folder in common must not mix theirs."""
    number, count = share
    return run_dir if count == 1 else run_dir / f"worker_{number}of{count}"


def reward_model_input(config: RolloutsConfig) -> ModelInput | None:
    """Load the maker of the reward model's input; None without a reward model. Raises ConfigError."""
    if not isinstance(config, Config) or not uses_reward_model(config):
        return None
    scoring = config.reward_model
    assert scoring.model.path is not None
    return ModelInput(
        scoring.model.path,
        scoring.max_length,
        trust_remote_code=scoring.model.trust_remote_code,
        date=config.actor_rollout_ref.model.chat_template_date,
    )


def on_resume_of(tools: ToolSet, interactions: Mapping[str, Interaction]) -> dict[str, OnResume]:
    """Return how sessions with each tool and interaction come back. Raises ConfigError for an unknown word."""
    found = {f"tool {name}": slot.on_resume for name, slot in tools.slots.items()}
    found |= {f"interaction {name}": one.on_resume for name, one in interactions.items()}
    for who, word in found.items():
        try:
            check_on_resume(word)
        except ConfigError as error:
            raise ConfigError(f"{who}: {error}") from error
    return found


class IdleWatch:
    """Seconds in which an engine was held or ran no request, by looking at it again and again; on the event loop."""

    SECONDS = 0.1
    """Time between two looks."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.total = 0.0
        """Seconds since `begin`. Safe from any thread."""
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look from now on, as long as the loop runs; every later call does nothing."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self.SECONDS)
            now, health = time.monotonic(), await self._engine.health()
            if health.paused or not health.running:
                self.total += now - before
            before = now


class LocalRollouts:
    """`RolloutRunner` by a scheduler and an engine that live on one event loop, `loop`.

    Args:
        record_dir: where trajectories are written, in the run's folder.
        share: index of this process, and number of processes that write trajectories.
    """

    def __init__(
        self,
        config: RolloutsConfig,
        scheduler: Scheduler,
        engine: RolloutEngine,
        loop: LoopThread,
        reporter: Reporter,
        record_dir: Path,
        share: tuple[int, int] = (1, 1),
    ) -> None:
        """Raises ConfigError where a reward model's input cannot be made."""
        self.config = config
        self.scheduler = scheduler
        self.engine = engine
        self.reporter = reporter
        self.loop = loop
        self.record_dir, self.run_dir = record_dir, record_dir.parent
        self.share = share
        self.reading = reward_model_input(config)
        self.on_resume: Mapping[str, OnResume] = {}
        """How sessions with each tool and interaction come back; see `on_resume_of`."""
        training = config if isinstance(config, Config) else None
        self.turn_reward_coef = 0.0 if training is None else training.algorithm.turn_reward_coef
        """Not read where nothing is trained."""
        self.saving = None if training is None else Saving(training)
        self.teaches = None if training is None else load_filter(training.algorithm)
        """Rule of groups; None: each group that can be trained on is."""
        self.replays_experts = training is not None and training.actor_rollout_ref.actor.router_replay.of_engine
        self.columns = () if training is None else made_columns(training)
        """Columns of the batch that are made from trajectories for the estimator or the loss."""
        self.privileged = training is not None and training.distillation.is_privileged
        self.needs_weights = False
        """See `RolloutRunner.needs_weights`."""
        self.on_loss: Callable[[], object] = lambda: None
        """Never called: in one process nothing can die but the run itself."""
        self.takes_version: Callable[[int, int], bool] = lambda ordinal, version: True
        """See `RolloutRunner.takes_version`."""
        self.is_broken = False
        frees = config.actor_rollout_ref.rollout.free_cache_engine
        self._in_flight = engine if isinstance(engine, InFlightEngine) and not frees else None
        """The engine where it samples while the policy is updated; an engine that must free its memory does not."""
        self.in_flight_updates = self._in_flight is not None
        self.version = 0
        """Version of the weights that the engine has taken whole: it samples by no older weights."""
        self._is_paused = False
        self._ended: dict[int, list[Trajectory]] = {}
        """Trajectories of groups that have ended and are in no batch, by the prompt's ordinal."""
        self.watches: Sequence[TrajectoryWatch] = ()
        """Observers of trajectories and of the engine's weights."""
        self._once = OncePerKey()
        self.idle = IdleWatch(engine)
        self.delay = DelayWatch()
        loop.call_soon(self.delay.begin)

    @property
    def serves_people(self) -> bool:
        return any(one.waits_for_people for one in self.scheduler.loops.values())

    def pack_trajectories(
        self, task: Task, trajectories: list[Trajectory], first: int = 0, *, show: bool = False
    ) -> Rollout:
        """Make the result of a task from its trajectories, which are numbered from `first`, and write them."""
        for one in self.watches:
            one.packed(trajectories)
        batch = None
        if task.split == "train":
            coef = self.turn_reward_coef
            batch = from_trajectories(
                trajectories,
                turn_reward_coef=coef,
                first=first,
                columns=self.columns,
                experts=self.replays_experts,
                privileged=self.privileged,
            )
        if task.split == "generate":
            return Rollout([], whole=trajectories)
        return Rollout(
            [trajectory.outline() for trajectory in trajectories],
            batch,
            next((trajectory for trajectory in trajectories if trajectory.transcripts), None) if show else None,
            None if self.reading is None else conversations(trajectories, self.reading, first),
            self._write(task, trajectories),
        )

    def requests(self, task: Task, group: int, sample: Sample) -> list[Request]:
        """Ask for the trajectories of one prompt."""
        origins = [task.origin(group, k, sample) for k in range(task.each)]
        return [
            Request(
                uid=origin.uid,
                group=group,
                sample=sample,
                params=GREEDY if origin.greedy else task.params,
                seed=seed_of(self.config.trainer.seed, task.seeds, group, k),
                count_drift=k == 0,  # of one trajectory a prompt: a whole render costs as much as the prompt's
                baseline=origin.greedy and task.split == "train",
                origin=origin,
            )
            for k, origin in enumerate(origins)
        ]

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        done = 0
        for path, count in files:
            if path.exists():
                fill_rewards(path, outlines[done : done + count], self.turn_reward_coef)
            else:  # a worker that took another's place may be on another machine
                self.reporter.warn(f"{path} is not on this machine: the reward model's part is missing in it")
            done += count

    async def run_group(
        self, work: PromptTask, on_begin: Callable[[int], None], on_end: Callable[[], None], log: Log | None
    ) -> EndedGroup:
        is_begun = False

        def begins() -> None:
            nonlocal is_begun
            if not is_begun:
                is_begun = True
                on_begin(self.version)

        # The oldest first, which are due first. Without a log a step waits for all of them.
        priority = 0 if log is None else work.ordinal
        requests = [
            replace(
                request,
                group=work.ordinal,
                on_begin=begins,
                params=replace(request.params, priority=priority),
                takes_version=partial(self.takes_version, work.ordinal),
            )
            for request in self.requests(work.task, work.number, work.sample)
        ]
        # Experts of tokens are not written down.
        if (
            log is not None
            and not self.replays_experts
            and self.scheduler.loops[work.sample.agent_name].on_resume != "none"
        ):
            requests = self._logged(requests, log)
        trajectories = await self.scheduler.run(requests, lambda _: on_end())
        self.check()
        asked = [(request, work.sample) for request in requests]
        for one in self.watches:
            one.ended(asked, trajectories, trained=work.task.split == "train")
        teaches = self.teaches if work.task.split == "train" else None
        outcome = judge_group(trajectories, teaches)
        oldest = oldest_version(one for one in trajectories if exclusion(one) is None)
        is_replaced = outcome is not GroupStatus.SCORED and teaches is not None and log is not None
        if not is_replaced:
            self._ended[work.ordinal] = trajectories
        record = None
        if log is not None:
            record = record_of(work.ordinal, work.sample, outcome, oldest, trajectories, whole=not is_replaced)
        return EndedGroup(work.ordinal, outcome, oldest, record)

    def _logged(self, requests: Sequence[Request], log: Log) -> list[Request]:
        """Record the answers to the trajectories, and give recorded answers again."""
        recorded = defaultdict[str, list[Entry]](list)
        for entry in log.read():
            recorded[entry.trajectory].append(entry)

        def restarts(why: str) -> None:
            if self._once(why):
                self.reporter.note(f"unfinished trajectories restart: {why}")

        return [
            replace(one, journal=CallJournal(one.uid, log.add, recorded[one.uid], self.on_resume, restarts))
            for one in requests
        ]

    async def stop_groups(self) -> None:
        self._ended.clear()
        for one in self.watches:
            one.forget()

    def pop_group(self, ordinal: int) -> list[Trajectory] | None:
        """Give up the trajectories of a group that has ended; None where nothing is to be trained on them."""
        return self._ended.pop(ordinal, None)

    async def pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.scheduler.clock.stop()
            await self.engine.pause("retract")

    async def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.scheduler.clock.resume()
            await self.engine.resume()

    async def lock_weights(self) -> None:
        await self._settle()
        if self._in_flight is not None:
            await self._in_flight.lock_weights()

    async def unlock_weights(self, weights: Weights, version: int) -> None:
        if self._in_flight is not None:
            await self._in_flight.unlock_weights(weights, version)

    async def idle_seconds(self) -> float:
        self.idle.begin()
        return self.idle.total

    def pack(
        self, task: Task, ordinals: Sequence[int], journal: Journal | None, first: int = 0, *, show: bool = False
    ) -> Rollout:
        groups = []
        for one in ordinals:
            if (group := self.pop_group(one)) is None:
                assert journal is not None
                group = trajectories_in(journal.record(one))
            groups.append(group)
        return self.pack_groups(task, groups, first, show=show)

    def pack_groups(
        self, task: Task, groups: Sequence[list[Trajectory]], first: int = 0, *, show: bool = False
    ) -> Rollout:
        """Make a batch, or a part of one, of groups that are numbered from `first`."""
        trajectories: list[Trajectory] = []
        for number, group in enumerate(groups, first):
            for trajectory in group:
                trajectory.group = number
            trajectories += group
        made = self.pack_trajectories(task, trajectories, first * task.each, show=show)
        for one in trajectories:
            for transcript in one.transcripts if exclusion(one) is None and not one.baseline else ():
                for span in transcript.versions:
                    if span.start < transcript.trained_end:
                        made.versions[span.version] += min(span.end, transcript.trained_end) - span.start
        return made

    def replace_dead_workers(self) -> None:
        """Nothing to do: trajectories run in this process."""

    def update_weights(self, weights: Weights, version: int, *, in_flight: bool = False) -> SyncReport:
        for one in self.watches:
            weights = one.sending(weights)
        try:
            report = self.loop.run(self._update(weights, version, in_flight=in_flight))
            if self.needs_weights:
                self.loop.run(self.engine.wake())
                self.needs_weights = False
        except EngineError as error:
            raise TrainingError(f"weights of step {version}: {error}") from error
        for one in self.watches:
            one.sent(version)
        if not (in_flight and self.in_flight_updates):
            self.loop.run(self._settle())
        return report

    async def _update(self, weights: Weights, version: int, *, in_flight: bool) -> SyncReport:
        flying = self._in_flight if in_flight else None
        stops = in_flight and not self._is_paused
        if stops:
            self.scheduler.clock.stop()
        try:
            update = self.engine.update_weights if flying is None else flying.update_in_flight
            report = await update(weights, version)
            self.version = version
            return report
        finally:
            if stops:
                self.scheduler.clock.resume()

    def sleep(self) -> None:
        if self.config.actor_rollout_ref.rollout.free_cache_engine:
            self.loop.run(self.engine.sleep())
            self.needs_weights = True

    def metrics(self) -> Metrics:
        return self.loop.run(self._take_metrics())

    def restart_workers(self) -> None:
        """Drop the findings of a step that is done again: in one process no rollout worker can die."""
        for one in self.watches:
            one.result()

    async def _take_metrics(self) -> Metrics:
        """Take them in a coroutine, since users' tools and interactions are bound to the loop's thread."""
        metrics, context = Metrics(), self.scheduler.context
        metrics.max("rollout/loop_delay_seconds", self.delay.take())
        metrics.add((await self.engine.health()).metrics, "engine/")
        metrics.add(context.tools.take_metrics(self._raise_or_warn))
        for name, interaction in context.interactions.items():
            numbers = collect_numbers(f"interaction {name}", interaction.take_metrics, self._raise_or_warn)
            metrics.add(numbers, f"interaction/{name}/")
        if self.scheduler.reward is not None:
            metrics.add(self.scheduler.reward.take_metrics())
        return metrics

    def _raise_or_warn(self, error: CodeError) -> None:
        """Raise an error of a user's code, or warn of it once a place; see `rollout.agent.on_code_error`."""
        if self.config.actor_rollout_ref.rollout.agent.on_code_error == "error":
            raise error
        if self._once(error.place or error.summary):
            self.reporter.warn(f"{error}\n  Its numbers are left out")

    def checked(self) -> Report:
        return self.loop.run(self._take_report())

    async def _take_report(self) -> Report:
        await self._settle()
        report = Report()
        for one in self.watches:  # on the loop, on which trajectories that end are seen
            report.add(one.result())
        return report

    async def _settle(self) -> None:
        for one in self.watches:
            await one.settle()

    def _write(self, task: Task, trajectories: list[Trajectory]) -> list[tuple[Path, int]]:
        """Write the trajectories to a file, if they are to be; return it with their number, as in `Rollout.files`."""
        if self.saving is None or not self.saving.writes(task.split):
            return []
        path = write_trajectories(
            self.record_dir,
            [one for one in trajectories if self.saving.takes(task, one.group)],
            step=task.step,
            split=task.split,
            part=task.part,
            share=task.share,
            turn_reward_coef=self.turn_reward_coef if self.reading is None else None,
        )
        return [(path, len(trajectories))]

    @contextmanager
    def observed(self, task: Task, total: int | None) -> Iterator[Callable[[], None]]:
        """Show, watch and profile a coroutine, which calls the yielded function for each end of `total`."""
        with self.reporter.stage(task.name, total=total) as stage:
            ended = 0

            def on_end() -> None:
                nonlocal ended
                ended += 1
                stage.advance(1)

            watch = asyncio.create_task(self.watch(lambda: ended, task.name))
            try:
                with self.profiled(task):
                    yield on_end
            finally:
                watch.cancel()

    @contextmanager
    def profiled(self, task: Task) -> Iterator[None]:
        """Profile the trajectories of a step, if the config asks for it."""
        profile = None
        if task.split == "train" and isinstance(self.config, Config):
            profile = rollout_profile(self.config.trainer, self.run_dir, task.step)
        with profiled(profile, self.share[0] - 1), nvtx_range(task.name):
            yield

    def check(self) -> None:
        """Raise the error of tools that answer no call any more, or of a call that is on no cassette."""
        cassette = self.scheduler.context.tools.cassette
        if cassette is not None:
            cassette.check()
        if self.config.actor_rollout_ref.rollout.agent.on_code_error == "error":
            self.scheduler.context.tools.check()

    async def watch(self, ended: Callable[[], int], title: str) -> None:
        """Warn, whenever no trajectory ended for a while, which events the running trajectories wait for."""
        before = -1
        while True:
            await asyncio.sleep(STALL_SECONDS)
            found = self.scheduler.waiting_for()
            if ended() == before and (found or not self.scheduler.running):
                waiting = ", ".join(f"{count} for {what}" for what, count in found.items())
                self.reporter.warn(
                    f"{title}: no trajectory ended in {STALL_SECONDS:g} s; waiting: {waiting or 'scoring'}"
                )
            before = ended()
