"""The source whose trajectories go on while the policy is updated.

Groups are tasks on the event loop of the rollouts, and `agentrl.rollouts.flow` says which may begin and which batch
takes them. Everything of the flow happens on the loop's thread, so nothing is locked.

The engine shares its processor with the update: it is held, and keys and values are dropped, from taking a batch until
the next one is asked for. Tools go on meanwhile. What the engine samples then depends on the order of events on the
loop alone, not on how long updates take: where tools answer on the loop, too, the numbers of a run repeat.

What it adds to a step's metrics where the bound is above 0:

| name | what it is |
|---|---|
| `async/staleness_mean`, `async/staleness_max` | staleness of the batch's sampled tokens |
| `async/publish_lag` | versions made and not published when the batch was taken |
| `async/open`, `async/ready` | prompts that go on beside the update, and those that a later batch will take |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.agent_loop import Request
from agentrl.config import Config
from agentrl.data.loader import Loader
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import DataError
from agentrl.rollouts.contract import Rollout, Task, training, validation
from agentrl.rollouts.flow import Batch, Fate, Flow, Outcome, Settings, Wait
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.prompts import Prompts
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.metrics import Metrics, Numbers
from agentrl.trajectory import Outline, Status, Trajectory, exclusion
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.staleness import oldest_version, publish_lag, staleness


@dataclass(slots=True)
class _Running:
    """A group that was begun."""

    task: asyncio.Task[None]
    begun: bool = False
    trajectories: list[Trajectory] | None = None
    """None until all have ended."""


class Overlapping:
    """`TrajectorySource` that begins trajectories of later steps before a step's update has ended.

    With a bound of 0 it takes turns.
    """

    def __init__(self, config: Config, loader: Loader, rollouts: LocalRollouts, settings: Settings) -> None:
        self.config, self.rollouts = config, rollouts
        self.flow = Flow(settings)
        self.prompts = Prompts(loader)
        self.counts = dict.fromkeys(Fate, 0)
        """Prompts by their fates, since the source was made."""
        self._running: dict[int, _Running] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        """The error that ended a group."""
        self._held = self._loaded = False
        self._weights: Weights | None = None
        """Weights that `publish` was last given."""
        self._numbers: Numbers = {}
        self._on_end: Callable[[], None] | None = None
        """Called when a trajectory of training has ended, while a batch is waited for."""

    @property
    def needs_weights(self) -> bool:
        """See `TrajectorySource`."""
        return self.rollouts.needs_weights

    def next_batch(self, step: int, *, show: bool = False) -> Rollout:
        """Wait for the batch of `step`: groups that are due first, in the order of their prompts."""
        task = training(self.config, step)
        # Here, not on the loop: a data set of a user's may belong to the thread that made it.
        self.prompts.draw_to(self.flow.next_ordinal + self.flow.room)
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
        """Return the flow, and the position in the data before the oldest prompt that no batch has taken."""
        return self.rollouts.loop.run(self._state())

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Go on where the state was taken. Prompts that were begun then begin anew, by the weights of `publish`.

        Raises DataError when the data are others, or more was begun than the settings allow.
        """
        self.rollouts.loop.run(self._load(state))

    def revive(self) -> None:
        """See `TrajectorySource`."""
        self.rollouts.revive()

    def close(self) -> None:
        """Cancel what has begun and was not taken."""
        self.rollouts.loop.run(self._cancel())

    def decide(self, fates: Mapping[int, Fate]) -> None:
        """Take down what became of prompts; on the loop's thread."""
        for fate in fates.values():
            self.counts[fate] += 1

    async def _next(self, task: Task) -> list[Trajectory]:
        await self._end_update()
        settings = self.flow.settings
        total = None if settings.max_staleness else settings.batch_size * task.each
        try:
            with self.rollouts.observed(task, total) as self._on_end:
                await self._go_on()
                self._admit()
                while isinstance(found := self._found(), Wait):
                    self._changed.clear()
                    await self._changed.wait()
                self.rollouts.check()
                trajectories = self._taken(found)
                await self._hold()
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

    def _taken(self, batch: Batch) -> list[Trajectory]:
        """Go over to the state after the batch; return its trajectories, whose groups are numbered from 0."""
        current = self.flow.version
        trajectories: list[Trajectory] = []
        for number, ordinal in enumerate(batch.fates):
            group = self._running.pop(ordinal).trajectories
            assert group is not None
            for trajectory in group:
                trajectory.group = number
            trajectories += group
        oldest = oldest_version(one for one in trajectories if exclusion(one) is None)
        settings = self.flow.settings
        if oldest is not None and staleness(oldest, current) > settings.max_staleness:
            raise RuntimeError(f"a token of version {oldest} is too old for version {current}: {settings}")
        self.flow = batch.flow
        self.decide(batch.fates)
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
            await self._hold()
        except BaseException:
            await self._cancel()
            raise
        self.flow = self.flow.go_on()
        return trajectories

    def _send(self, weights: Weights) -> SyncReport:
        """Have the engine, which is held, sample by `weights`."""
        report = self.rollouts.update_weights(weights, self.flow.version)
        self.rollouts.loop.run(self._published())
        return report

    async def _published(self) -> None:
        self.flow = self.flow.publish()

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
        """Begin what may begin."""
        for group in self.flow.groups:  # of a state that was loaded
            if group.ordinal not in self._running:
                self._begin(group.ordinal)
        while not self._held and self.flow.can_admit:
            ordinal = self.flow.next_ordinal
            self.flow = self.flow.admit()
            self._begin(ordinal)

    def _begin(self, ordinal: int) -> None:
        sample, size = self.prompts[ordinal], self.flow.settings.batch_size
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
            self.flow, fate = self.flow.finish(ordinal, outcome, oldest_version(usable))
            self._running[ordinal].trajectories = trajectories
            if fate is not Fate.OPEN:
                del self._running[ordinal]
                self.decide({ordinal: fate})
            self._admit()
        except Exception as error:
            self._error = self._error or error
        self._changed.set()

    def _ended(self, trajectory: Trajectory) -> None:
        if self._on_end is not None:
            self._on_end()

    async def _cancel(self) -> None:
        """End all that has begun and was not taken; raises nothing of it."""
        await self._stop()
        self.flow, fates = self.flow.cancel()
        self.decide(fates)

    async def _stop(self) -> None:
        running, self._running = self._running, {}
        for one in running.values():
            one.task.cancel()
        await asyncio.gather(*(one.task for one in running.values()), return_exceptions=True)

    async def _state(self) -> dict[str, JSON]:
        await self._end_update()
        return self.prompts.state() | {"flow": self.flow.state()}

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
        self._loaded = True
