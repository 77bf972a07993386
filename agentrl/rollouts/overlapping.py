"""The source whose trajectories go on while the policy is updated.

Groups are tasks on the event loop of the rollouts, and `agentrl.rollouts.flow` says which may begin and which batch
takes them. Everything of the flow happens on the loop's thread, so nothing is locked.

An `InFlightEngine` samples while the policy is updated, and takes new weights while its requests run. Any other engine
shares its processor with the update: it is held, and keys and values are dropped, from taking a batch until the next
one is asked for. Tools go on meanwhile. What such an engine samples depends on the order of events on the loop alone,
not on how long updates take: where tools answer on the loop, too, the numbers of a run repeat.

What it adds to a step's metrics where the bound is above 0:

| name | what it is |
|---|---|
| `async/staleness_mean`, `async/staleness_max` | staleness of the batch's sampled tokens |
| `async/publish_lag` | versions made and not published when the batch was taken |
| `async/open`, `async/ready` | prompts that go on beside the update, and those that a later batch will take |
| `async/trained` | prompts trained on so far |
| `async/trainer_idle` | share of the time since the batch before in which the trainer waited for this one |
| `async/engine_idle` | share of the time since then in which the engine was held or had no request |
| `async/journal_bytes` | disk that the journal takes (`agentrl.rollouts.journal`) |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.agent_loop import Request
from agentrl.config import Config
from agentrl.data.loader import Loader
from agentrl.engines.contract import InFlightEngine, RolloutEngine
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import DataError
from agentrl.rollouts.contract import Progress, Rollout, Task, training, validation
from agentrl.rollouts.flow import Batch, Fate, Flow, Outcome, Settings, Wait
from agentrl.rollouts.journal import validity
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.prompts import Prompts
from agentrl.rollouts.record import Record
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.metrics import Metrics, Numbers
from agentrl.trajectory import Outline, Status, Trajectory, exclusion
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.staleness import oldest_version, publish_lag, staleness


@dataclass(slots=True)
class _Running:
    """A group that was begun."""

    task: asyncio.Task[None] | None
    """None: it had ended in a process before."""
    begun: bool = False
    trajectories: list[Trajectory] | None = None
    """None until all have ended."""


class _Idle:
    """Shares of time in which the trainer waits and the engine has nothing to do; on the loop's thread."""

    SECONDS = 0.1
    """Time between two looks at the engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._began = self._asked = time.monotonic()
        self._engine_seconds = 0.0
        self._looking: asyncio.Task[None] | None = None

    def waits(self) -> None:
        """Note that the trainer waits for a batch from now on."""
        self._asked = time.monotonic()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())

    def shares(self) -> Numbers:
        """Take the shares of the time since they were last taken, now that the trainer waits no more."""
        now = time.monotonic()
        whole = max(now - self._began, 1e-9)
        found = {"trainer_idle": (now - self._asked) / whole, "engine_idle": min(self._engine_seconds / whole, 1.0)}
        self._began, self._engine_seconds = now, 0.0
        return found

    def stop(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self.SECONDS)
            now, health = time.monotonic(), await self._engine.health()
            self._engine_seconds += now - before if health.paused or not health.running else 0.0
            before = now


class Overlapping:
    """`TrajectorySource` that begins trajectories of later steps before a step's update has ended.

    With a bound of 0 it takes turns.
    """

    def __init__(self, config: Config, loader: Loader, rollouts: LocalRollouts, settings: Settings) -> None:
        self.config, self.rollouts = config, rollouts
        self.flow = Flow(settings)
        self.prompts = Prompts(loader)
        self.record = Record(rollouts.record_dir.parent, validity(config), rollouts.audience.note)
        self._running: dict[int, _Running] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        """The error that ended a group."""
        self._held = self._loaded = False
        self._in_flight = isinstance(rollouts.engine, InFlightEngine)
        self._released = False
        """An engine that samples on may not read the weights: an update may have changed them."""
        self._idle = _Idle(rollouts.engine)
        self._weights: Weights | None = None
        """Weights that `publish` was last given."""
        self._numbers: Numbers = {}
        self._on_end: Callable[[], None] | None = None
        """Called when a trajectory of training has ended, while a batch is waited for."""
        self._shown = ExitStack()
        self._lane: Progress | None = None
        """The rollouts' own line on the display, beside the trainer's stages."""

    @property
    def needs_weights(self) -> bool:
        """See `TrajectorySource`."""
        return self.rollouts.needs_weights

    def next_batch(self, step: int, *, show: bool = False) -> Rollout:
        """Wait for the batch of `step`: groups that are due first, in the order of their prompts."""
        task = training(self.config, step)
        self.record.begin()
        # Here, not on the loop: a data set of a user's may belong to the thread that made it.
        settings = self.flow.settings
        # In flight, others begin when this batch is taken.
        ahead = settings.batch_size if self._in_flight and step < settings.last_step else 0
        self.prompts.draw_to(self.flow.next_ordinal + max(self.flow.room, 0) + ahead)
        return self.rollouts.pack(task, self.rollouts.loop.run(self._next(task)), show=show)

    def validate(
        self, samples: Sequence[Sample], step: int, *, greedy: bool, show: bool = False, first: int = 0
    ) -> Rollout:
        """See `TrajectorySource`. Trajectories of training go on beside it; none begins."""
        task = validation(self.config, step, greedy=greedy, first=first)
        self.rollouts.loop.run(self._end_update())
        if self.flow.served != self.flow.version and self._weights is not None:
            self._send(self._weights)
        trajectories = self.rollouts.loop.run(self._validate(task, samples, first))
        return self.rollouts.pack(task, trajectories, first * task.each, show=show)

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        """See `TrajectorySource`."""
        self.rollouts.fill_rewards(files, outlines)

    def rest(self) -> None:
        """See `TrajectorySource`."""
        self.rollouts.rest()

    def publish(self, weights: Weights, version: int) -> SyncReport:
        """Note the weights, and send them to the engine if that is due."""
        self._weights = weights
        if self.rollouts.loop.run(self._end_update(version)) or self.needs_weights:
            return self._send(weights)
        return SyncReport(0, 0.0)

    def metrics(self) -> Metrics:
        """See `TrajectorySource`."""
        metrics = self.rollouts.metrics()
        metrics.add(self._numbers, "async/")
        return metrics

    def state(self) -> dict[str, JSON]:
        """Return flow and ledger, and the position in the data before the oldest prompt that no batch has taken."""
        return self.rollouts.loop.run(self._state())

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Go on where the state was taken, and with what is recorded after it (see `agentrl.rollouts.record`).

        Prompts that had been begun and have not ended begin anew, by the weights of `publish`. Raises DataError when
        the data are others, the ledger disagrees with them, or more was begun than the settings allow.
        """
        self.rollouts.loop.run(self._load(state))
        self.prompts.draw_to(max(self.flow.next_ordinal, self.record.end))
        self.record.check_prompts(state, self.prompts.__getitem__)

    def saved(self) -> None:
        """See `TrajectorySource`."""
        self.rollouts.loop.run(self._saved())

    def report(self) -> str | None:
        """See `TrajectorySource`."""
        return self.record.text()

    def revive(self) -> None:
        """See `TrajectorySource`."""
        self.rollouts.revive()

    def close(self) -> None:
        """Cancel what has begun and was not taken."""
        try:
            self.rollouts.loop.run(self._cancel())
        finally:
            self._shown.close()

    async def _next(self, task: Task) -> list[Trajectory]:
        await self._end_update()
        engine = self.rollouts.engine
        if self._released and self._weights is not None and isinstance(engine, InFlightEngine):
            await engine.offer_weights(self._weights, self.flow.version)
            self._released = False
        settings = self.flow.settings
        if (again := self.record.again(self.flow)) is not None:
            groups = {ordinal: self.record.trajectories(ordinal) for ordinal in again.fates}
            batch = Batch(self.flow.repeat(again.fates), again.fates)
            return self._taken(batch, groups, again=True)
        total = None if settings.max_staleness else settings.batch_size * task.each
        if settings.max_staleness:
            task = replace(task, name="wait for a batch")
            if self._lane is None:
                self._lane = self._shown.enter_context(self.rollouts.audience.stage("rollouts"))
        try:
            with self.rollouts.observed(task, total) as self._on_end:
                await self._go_on()
                self._admit()
                self._idle.waits()
                while isinstance(found := self._found(), Wait):
                    self._changed.clear()
                    await self._changed.wait()
                self.rollouts.check()
                trajectories = self._taken(found, {one: self._ended_of(one) for one in found.fates})
                self._numbers |= self._idle.shares() if settings.max_staleness else {}
                await self._begin_update()
        except BaseException:
            await self._cancel()
            raise
        finally:
            self._on_end = None
        return trajectories

    def _found(self) -> Batch | Wait:
        if self._error is not None:
            raise self._error
        return self.flow.take()

    def _ended_of(self, ordinal: int) -> list[Trajectory]:
        trajectories = self._running.pop(ordinal).trajectories
        assert trajectories is not None
        return trajectories

    def _taken(self, batch: Batch, groups: Mapping[int, list[Trajectory]], *, again: bool = False) -> list[Trajectory]:
        """Go over to the state after the batch; return its trajectories, whose groups are numbered from 0."""
        current = self.flow.version
        trajectories: list[Trajectory] = []
        for number, ordinal in enumerate(batch.fates):
            for trajectory in groups[ordinal]:
                trajectory.group = number
            trajectories += groups[ordinal]
        oldest = oldest_version(one for one in trajectories if exclusion(one) is None)
        settings = self.flow.settings
        if oldest is not None and staleness(oldest, current) > settings.max_staleness:
            raise RuntimeError(f"a token of version {oldest} is too old for version {current}: {settings}")
        self.record.taken(batch.flow.step, current, batch.fates, again=again)
        self.flow = batch.flow
        self.prompts.forget_before(min((one.ordinal for one in self.flow.groups), default=self.flow.next_ordinal))
        if settings.max_staleness:
            self._numbers = self._measured(trajectories, current)
        return trajectories

    def _measured(self, trajectories: list[Trajectory], current: int) -> Numbers:
        ages = [
            (staleness(span.version, current), span.end - span.start)
            for one in trajectories
            if exclusion(one) is None
            for transcript in one.transcripts
            for span in transcript.versions
        ]
        tokens = sum(count for _, count in ages)
        numbers: Numbers = {
            "publish_lag": float(publish_lag(current, self.flow.served)),
            "open": float(sum(group.outcome is None for group in self.flow.groups)),
            "ready": float(sum(group.outcome is not None for group in self.flow.groups)),
            "trained": float(self.record.ledger.counts[Fate.TRAINED]),
            "journal_bytes": float(self.record.journal.size),
        }
        if tokens:
            numbers["staleness_mean"] = sum(age * count for age, count in ages) / tokens
            numbers["staleness_max"] = float(max(age for age, _ in ages))
        return numbers

    async def _validate(self, task: Task, samples: Sequence[Sample], first: int) -> list[Trajectory]:
        self.flow = self.flow.pause()
        try:
            await self._go_on()
            trajectories = await self.rollouts.responses(task, samples, first)
            if not self._in_flight:
                await self._hold()
        except BaseException:
            await self._cancel()
            raise
        self.flow = self.flow.go_on()
        if self._in_flight:
            self._admit()
        return trajectories

    def _send(self, weights: Weights) -> SyncReport:
        """Have the engine, which is held or can do it in flight, sample by `weights`."""
        if self._in_flight:
            self.rollouts.loop.call_soon(self.rollouts.scheduler.clock.stop)
        report = self.rollouts.update_weights(weights, self.flow.version, in_flight=True)
        self._released = False
        self.rollouts.loop.run(self._published())
        return report

    async def _published(self) -> None:
        self.flow = self.flow.publish()
        if self._in_flight:
            self.rollouts.scheduler.clock.go_on()
            if self._running:
                self._admit()

    async def _end_update(self, version: int | None = None) -> bool:
        """Note that the step's update, if there was one, made `version` (None: the policy is as before).

        Returns whether the engine is to be sent the weights.
        """
        if self._loaded and version is not None:
            self.flow, self._loaded = self.flow.restart(version), False
            return True
        if self.flow.updating:
            self.flow = self.flow.updated(self.flow.version if version is None else version)
        return self.flow.publish_is_due

    async def _begin_update(self) -> None:
        """Have the policy's weights changed from now on."""
        if isinstance(self.rollouts.engine, InFlightEngine):
            self._admit()
            await self.rollouts.engine.release_weights()
            self._released = True
        else:
            await self._hold()

    async def _hold(self) -> None:
        """Keep the engine from sampling; what it has sampled of running requests stays."""
        if not self._held:
            self._held = True
            self.rollouts.scheduler.clock.stop()
            await self.rollouts.engine.pause("retract")

    async def _go_on(self) -> None:
        """Let the engine sample."""
        if self._held:
            self._held = False
            self.rollouts.scheduler.clock.go_on()
            await self.rollouts.engine.resume()

    def _admit(self) -> None:
        """Begin what may begin; nothing before all batches are taken again that a process before took."""
        if self.record.plan:
            return
        for group in self.flow.groups:  # of a state that was loaded
            if group.ordinal not in self._running:
                self._begin(group.ordinal)
        while not self._held and self.flow.can_admit and self.flow.next_ordinal < self.prompts.end:
            ordinal = self.flow.next_ordinal
            self.flow = self.flow.admit()
            self._begin(ordinal)

    def _begin(self, ordinal: int) -> None:
        sample, size = self.prompts[ordinal], self.flow.settings.batch_size
        if (ended := self.record.recalled(ordinal)) is not None:
            self.flow = self.flow.recall(ordinal, ended.outcome, ended.oldest)
            if any(one.ordinal == ordinal for one in self.flow.ready):
                self._running[ordinal] = _Running(None, True, self.record.trajectories(ordinal))
                return
        # Names and seeds are those of taking turns, where the step's batch is the next one of the data.
        task = training(self.config, ordinal // size + 1)

        def on_begin() -> None:
            if not running.begun:
                running.begun = True
                self.flow = self.flow.begin(ordinal)

        requests = [
            replace(request, group=ordinal, on_begin=on_begin)
            for request in self.rollouts.requests(task, ordinal % size, sample)
        ]
        running = _Running(asyncio.create_task(self._run(ordinal, requests)))
        self._running[ordinal] = running

    async def _run(self, ordinal: int, requests: list[Request]) -> None:
        try:
            trajectories = await self.rollouts.scheduler.run(requests, self._ended)
            usable = [one for one in trajectories if exclusion(one) is None]
            late = any(one.status is Status.TIMEOUT for one in trajectories)
            outcome = Outcome.SCORED if usable else Outcome.TIMEOUT if late else Outcome.FAILED
            oldest = oldest_version(usable)
            self.flow, fate = self.flow.finish(ordinal, outcome, oldest)
            if fate is Fate.OPEN:
                self._running[ordinal].trajectories = trajectories
                self.record.ended(ordinal, self.prompts[ordinal], outcome, oldest, trajectories)
            else:
                del self._running[ordinal]
                self.record.ledger.settle({ordinal: fate})
            self._admit()
        except Exception as error:
            self._error = self._error or error
        self._changed.set()

    def _ended(self, trajectory: Trajectory) -> None:
        if self._on_end is not None:
            self._on_end()
        if self._lane is not None:
            ready = len(self.flow.ready)
            self._lane.advance(1, open=len(self.flow.groups) - ready, ready=ready)

    async def _cancel(self) -> None:
        """End all that has begun and was not taken; raises nothing of it."""
        await self._stop()
        self.flow, fates = self.flow.cancel()
        self.record.ledger.settle(fates)

    async def _stop(self) -> None:
        self._idle.stop()
        running, self._running = self._running, {}
        tasks = [one.task for one in running.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _state(self) -> dict[str, JSON]:
        await self._end_update()
        return self.prompts.state() | {
            "flow": self.flow.state(),
            "ledger": self.record.ledger.state(),
            "prompts": self.record.prompts(self.flow, self.prompts.__getitem__),
        }

    async def _saved(self) -> None:
        self.record.saved()

    async def _load(self, state: Mapping[str, JSON]) -> None:
        await self._stop()
        settings, flow, step = self.flow.settings, state.get("flow"), state.get("step", 0)
        if flow is None:
            taken = step if isinstance(step, int) else 0
            self.flow = Flow(settings, step=taken, next_ordinal=taken * settings.batch_size)
        else:
            self.flow = Flow.load(settings, as_mapping(flow))
        most = (1 + settings.depth) * settings.batch_size
        if len(self.flow.groups) > most:
            raise DataError(
                f"the checkpoint holds {len(self.flow.groups)} prompts that were begun and not trained on, and with "
                f"async_training.depth={settings.depth} at most {most} may be: set async_training.depth and "
                "max_staleness as they were when it was made, or higher"
            )
        self.prompts.load(state, self.flow.next_ordinal)
        self.record.load(state, self.flow)
        self._loaded = True
