"""The source of a training's trajectories, at every bound of their staleness.

The training loop knows an `AsyncSource` and no lower layer. The source owns the stream of prompts, because only it
knows which prompts have begun. `agentrl.rollouts.staleness_scheduler` decides which may begin and which batch takes
them. Only the runner (`agentrl.rollouts.contract`) knows where they run: in this process or in workers under Ray.

Groups are tasks on an event loop, and the whole schedule runs on the loop's thread, so nothing is locked. With
`async_training.max_staleness=0` the schedule admits nothing ahead. The groups of a step begin together, and all have
ended when the batch is taken: rollouts and updates take turns. Nothing outlives a step then, so no ledger and no
journal is written.

With a bound above 0 groups continue while the policy is updated. An engine with devices of its own samples meanwhile,
and takes new weights while its requests run. Any other engine shares its processor, or its memory, with the update. It
is held, and its KV cache is dropped, from taking a batch until the next one is asked for. Tools continue. The samples
of an embedded engine depend on the order of events on the loop alone, not on how long updates take. Where tools answer
on the loop, too, the numbers of a run replay.

docs/async.md lists its metrics `async/*`, and docs/algorithms.md `refill/*` (dynamic sampling).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from agentrl.config import Config
from agentrl.data.loader import Loader
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import DataError, TrainingError
from agentrl.observe.report import Report
from agentrl.rollouts.contract import PromptTask, Rollout, RolloutRunner, Task, check_failures, training, validation
from agentrl.rollouts.dynamic_sampling import cannot_be_filled, filled, replaced, shortage
from agentrl.rollouts.journal import validity
from agentrl.rollouts.prompts import Prompts
from agentrl.rollouts.record import Record
from agentrl.rollouts.rounds import run_round
from agentrl.rollouts.staleness_scheduler import (
    Batch,
    GroupStatus,
    NotReady,
    PromptStatus,
    Settings,
    StalenessScheduler,
)
from agentrl.system.cancellation import leaked_cancellation_fails
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.metrics import Metrics, Numbers
from agentrl.system.reporter import Progress
from agentrl.trajectory import Outline
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.staleness import publish_lag, staleness


class _Idle:
    """Shares of time in which the trainer waits and the engines have nothing to do; on the loop's thread."""

    def __init__(self, rollouts: RolloutRunner) -> None:
        self._rollouts = rollouts
        self._began = time.monotonic()
        self._asked: float | None = None
        self._engine = 0.0
        """Seconds of idle engines until `_began`."""

    async def waits(self) -> None:
        """Note that the trainer waits for a batch from now on."""
        if self._asked is None:
            self._asked = time.monotonic()
            await self._rollouts.idle_seconds()  # counted from the first call on

    async def shares(self) -> Numbers:
        """Take the shares of the time since they were last taken, now that the trainer waits no more."""
        now, engine = time.monotonic(), await self._rollouts.idle_seconds()
        whole = max(now - self._began, 1e-9)
        waited = 0.0 if self._asked is None else now - self._asked
        found = {
            "async/trainer_idle": waited / whole,
            "async/engine_idle": min((engine - self._engine) / whole, 1.0),
        }
        self._began, self._engine, self._asked = now, engine, None
        return found


def settings_of(config: Config, total_steps: int) -> Settings:
    """Return the bounds that the config asks for."""
    keys, filters, batch = config.async_training, config.algorithm.filter_groups, config.data.train_batch_size
    if not keys.max_staleness:  # nothing begins for later steps, so that no step has to be the last one
        if not filters.refill:
            return Settings(batch, sys.maxsize)
        most = filters.max_num_gen_batches or None
        return Settings(batch, sys.maxsize, replaces=True, draw_size=config.data.draw_size, most_draws=most)
    drawn = filters.max_num_gen_batches * config.data.draw_size
    left = max(drawn - batch, 0) if filters.refill and drawn else None
    return Settings(batch, total_steps, keys.max_staleness, keys.depth, keys.publish_every, filters.refill, left)


class AsyncSource:
    """Source of the trajectories of each step.

    One step calls, in this order: `next_batch`, `metrics`, `sleep`, then, when the update is done, `publish` (if it
    made weights, or the source `needs_weights`) and `updated`. Validation and checkpoints fall between two steps;
    `state` may be called at any time. All calls come from one thread; each raises the errors of `RolloutRunner`. An
    error of a call ends all that was begun.
    """

    def __init__(
        self, config: Config, loader: Loader, rollouts: RolloutRunner, settings: Settings | None = None
    ) -> None:
        """`settings`: see `settings_of`; None: the settings of a bound of 0."""
        settings = settings_of(config, 0) if settings is None else settings
        self.config, self.loader, self.rollouts, self.loop = config, loader, rollouts, rollouts.loop
        self.schedule = StalenessScheduler(settings)
        self.prompts = Prompts(loader)
        overlaps = settings.max_staleness > 0
        fsync = config.async_training.journal_fsync
        self.record = Record(
            rollouts.run_dir, validity(config), rollouts.reporter.note, fsync=fsync, outlives_steps=overlaps
        )
        self._running: dict[int, asyncio.Task[None] | None] = {}
        """Groups that were begun; None: it had ended in a process before."""
        self._changed = asyncio.Event()
        rollouts.on_loss = self._changed.set
        rollouts.takes_version = self._takes_version
        self._error: BaseException | None = None
        """The error that ended a group."""
        self._is_paused = self._loaded = False
        self._is_locked = False
        """An engine that samples on may not read the weights: an update may have changed them."""
        self._idle = _Idle(rollouts) if overlaps else None
        """None where rollouts and updates take turns."""
        self._weights: Weights | None = None
        """Weights that `publish` was last given."""
        self._numbers: Numbers = {}
        self._ordinals: list[int] = []
        """Prompts of the step, in the order of the groups of its outlines."""
        self._on_end: Callable[[], None] | None = None
        """Called when a trajectory of training has ended, while a batch is waited for."""
        self._shown = ExitStack()
        self._lane: Progress | None = None
        """The rollouts' own line on the display, next to the trainer's stages."""

    @property
    def _in_flight(self) -> bool:
        """The engine samples while the policy is updated."""
        return self._idle is not None and self.rollouts.in_flight_updates

    @property
    def max_staleness(self) -> int:
        """Versions that a token of a batch may be older than the policy."""
        return self.schedule.settings.max_staleness

    @property
    def served(self) -> int:
        """Version of the policy that the engine has."""
        return self.schedule.served

    @property
    def needs_weights(self) -> bool:
        """No trajectory continues before the next `publish`, also if the step changed no weight."""
        return self.rollouts.needs_weights

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        """Write the reward model's part of rewards into the files of a rollout, whose outlines these are now."""
        self.rollouts.fill_rewards(files, outlines)

    def sleep(self) -> None:
        """Give up, until `publish`, the memory that the engine shares with the policy."""
        self.rollouts.sleep()

    def checked(self) -> Report:
        """Take the findings of checks about trajectories and the engine's weights since the last call."""
        return self.rollouts.checked()

    def updated(self, outlines: Sequence[Outline]) -> None:
        """Take note that a step's update has ended, whether or not it made weights; its step had these trajectories."""
        if self.loader.learns:
            self.prompts.update(self._ordinals, outlines)
        if self.schedule.updating:  # it made no weights
            self.loop.run(self._end_update())

    def next_batch(self, step: int, *, show: bool = False) -> Rollout:
        """Wait for the batch of `step`: groups that are due first, in the order of their prompts.

        The policy that is updated with them is the policy that `publish` was last given. With `show`, one of the
        trajectories is in the result whole. Raises TrainingError when too many groups were replaced.
        """
        try:
            return self._next_batch(training(self.config, step), show=show)
        except Exception:
            self.loop.run(self._cancel())
            raise

    def _next_batch(self, task: Task, *, show: bool) -> Rollout:
        settings, first = self.schedule.settings, self.schedule.next_ordinal
        self.record.begin()
        self._numbers, self._ordinals = {}, []
        # In flight, others begin when this batch is taken.
        ahead = settings.batch_size if self._in_flight and task.step < settings.last_step else 0
        parts: list[Rollout] = []
        batch: Batch | None = None
        while batch is None:
            # Here, not on the loop: a data set of a user's, and processes that are made, belong to this thread.
            self.prompts.draw_to(self.schedule.next_ordinal + max(self.schedule.room, 0) + ahead)
            self.record.check_prompts(self.prompts.__getitem__, self.prompts.end)
            if self.rollouts.is_broken:
                self.loop.run(self._unlock())
                self.rollouts.replace_dead_workers()
            batch = self.loop.run(self._next(task))
            if ended := self._unpacked(batch, first):
                part = replace(task, part=f"_{len(parts):03d}") if parts else task
                shows, group = show and not parts, len(self._ordinals)
                parts.append(self.rollouts.pack(part, ended, self.record.journal, group, show=shows))
                self._ordinals += ended
                if settings.draw_size is not None:  # else the step checks, when they are recorded
                    check_failures(self.config, task.step, [one for one in parts[-1].outlines if not one.baseline])
            if batch is None and cannot_be_filled(self.config, self.schedule):
                raise TrainingError(shortage(self.config, self.schedule, task.step, parts, first))
        rollout, version = parts[0], self.schedule.version
        if settings.draw_size is not None:
            rollout, numbers = filled(parts, batch, first)
            self._numbers |= numbers
        if rollout.versions and staleness(min(rollout.versions), version) > settings.max_staleness:
            oldest = min(rollout.versions)
            raise RuntimeError(f"a token of version {oldest} is too old for version {version}: {settings}")
        if self._idle is not None:
            self._numbers |= measured(self.schedule, self.record, rollout.versions, version)
        return rollout

    def _unpacked(self, batch: Batch | None, first: int) -> Sequence[int]:
        """Return the prompts of the batch, or of a generation batch that has ended; `first`: the first of the step."""
        if self.schedule.settings.draw_size is None:
            return () if batch is None else batch.ordinals
        return () if self.schedule.is_open else range(first + len(self._ordinals), self.schedule.next_ordinal)

    def refuse(self, step: int, outlines: Sequence[Outline]) -> None:
        """Take back the batch of `step`, whose trajectories, these, failed too often: the run ends.

        The run that resumes samples the prompts that failed again, these and those of later batches.
        """
        self.loop.run(self._refuse(step, {self._ordinals[one.group] for one in outlines if one.score is None}))

    def validate(
        self, samples: Sequence[Sample], step: int, *, greedy: bool, show: bool = False, first: int = 0
    ) -> Rollout:
        """Run trajectories of `samples`, whose prompts are numbered from `first`, all by the weights of `step`.

        Training trajectories continue during the call; no trajectory begins.
        """
        task = validation(self.config, step, greedy=greedy, first=first)
        self.loop.run(self._end_update())
        if self.schedule.served != self.schedule.version and self._weights is not None:
            self._send(self._weights)
        self.loop.run(self._unlock())
        before, after = self._begin_validation, self._end_validation
        try:
            return run_round(self.rollouts, task, samples, first, show=show, before=before, after=after)
        except BaseException:
            self.loop.run(self._cancel())
            raise

    def publish(self, weights: Weights, version: int) -> SyncReport:
        """Note the weights, and send them to the engine if that is due."""
        self._weights = weights
        if self.loop.run(self._end_update(version)) or self.needs_weights:
            return self._send(weights)
        self.loop.run(self._unlock())
        return SyncReport(0, 0.0)

    def metrics(self) -> Metrics:
        """Take the numbers of engine, tools, interactions and scorers since they were last taken."""
        metrics = self.rollouts.metrics()
        metrics.add(self._numbers)
        if self.loader.has_metrics:
            metrics.add(self.loader.metrics())
        return metrics

    def state(self) -> dict[str, JSON]:
        """Return, as JSON values, what a run continued after the current step needs of its prompts.

        These are schedule and ledger, and the position in the data before the oldest prompt that no batch has taken. A
        checkpoint holds these keys next to its own. The call changes no state, also while an update is under way.
        """
        return self.loop.run(self._state())

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Resume where the state was taken, with the records made after it (see `agentrl.rollouts.record`).

        Other keys of a checkpoint are ignored; `publish` follows. Prompts that had begun and not ended continue with
        its weights. Raises DataError when the data differ, the ledger disagrees with them, or more prompts had begun
        than the settings allow.
        """
        self.loop.run(self._load(state))
        if not self.loader.learns:  # such a sampler draws later rows once it has learnt again
            self.prompts.draw_to(max(self.schedule.next_ordinal, self.record.end))
        self.record.check_prompts(self.prompts.__getitem__, self.prompts.end)

    def saved(self) -> None:
        """Take note that a checkpoint with the last `state` is saved, or is being written."""
        self.loop.run(self._saved())

    def report(self) -> str | None:
        """Report the prompts by status at the run's end; None with a bound of 0, where each ends within its step."""
        return self.record.text()

    def restart_workers(self) -> None:
        """Replace workers that died; `load_state` and `publish` follow."""
        self.loop.run(self._stop())
        self.rollouts.restart_workers()

    def close(self) -> None:
        """Cancel groups that have begun and were not taken."""
        try:
            self.loop.run(self._cancel())
        finally:
            self.record.journal.close()
            self._shown.close()

    async def _next(self, task: Task) -> Batch | None:
        """Take the batch; None: it lacks prompts, which must be drawn, processes, or groups that teach."""
        await self._end_update()
        await self._unlock()
        if (batch := self.record.again(self.schedule)) is not None:
            self._take(batch, again=True)
            await self._lock()
            return batch
        try:
            with self._waiting(task) as self._on_end:
                await self._resume()
                self._admit()
                if self._idle is not None:
                    await self._idle.waits()
                while isinstance(found := self._found(), NotReady):
                    is_short = self.schedule.can_admit and self.schedule.next_ordinal >= self.prompts.end
                    if self.rollouts.is_broken or (is_short and not self._is_paused):
                        return None
                    self._changed.clear()
                    await self._changed.wait()
                if found is None:
                    return None
                if self._idle is not None:
                    self._numbers |= await self._idle.shares()
                self._take(found)
                await self._begin_update()
        except BaseException:  # here, so that an interrupt waits for the end of all in this call
            await self._cancel()
            raise
        finally:
            self._on_end = None
        return found

    def _found(self) -> Batch | NotReady | None:
        """Return the batch, if it is ready; None: too many groups were replaced. Raises the error of a group."""
        if self._error is not None:
            raise self._error
        return None if cannot_be_filled(self.config, self.schedule) else self.schedule.take()

    def _waiting(self, task: Task) -> AbstractContextManager[Callable[[], None]]:
        """Show the trajectories that a batch is waited for: of the step alone, or next to others."""
        if self._idle is None:
            open_ones = sum(group.outcome is None for group in self.schedule.groups)
            return self.rollouts.observed(task, (open_ones + self.schedule.room) * task.each)
        if self._lane is None:
            self._lane = self._shown.enter_context(self.rollouts.reporter.stage("rollouts"))
        return self.rollouts.observed(replace(task, name="wait for a batch"), None)

    def _take(self, batch: Batch, *, again: bool = False) -> None:
        """Go over to the state after the batch."""
        for ordinal in batch.statuses:
            self._running.pop(ordinal, None)
        self.record.taken(batch.schedule.step, self.schedule.version, batch.statuses, again=again)
        if self.schedule.settings.replaces:
            self._numbers |= replaced(self.schedule)
        self.schedule = batch.schedule
        self.prompts.forget_before(
            min((one.ordinal for one in self.schedule.groups), default=self.schedule.next_ordinal)
        )

    async def _begin_validation(self) -> None:
        self.schedule = self.schedule.pause()
        await self._resume()

    async def _end_validation(self) -> None:
        if not self._in_flight:
            await self._pause()
        self.schedule = self.schedule.resume()
        if self._in_flight and self._running:
            self._admit()

    def _send(self, weights: Weights) -> SyncReport:
        """Have the engine, which is held or can do it in flight, sample by `weights`."""
        report = self.rollouts.update_weights(weights, self.schedule.version, in_flight=self._in_flight)
        self._is_locked = False
        self.loop.run(self._published())
        return report

    async def _published(self) -> None:
        self.schedule = self.schedule.publish()
        if self._in_flight and self._running:
            self._admit()

    async def _unlock(self) -> None:
        """Allow the engine again to read the weights, which no update changes now."""
        if self._is_locked and self._weights is not None:
            await self.rollouts.unlock_weights(self._weights, self.schedule.version)
            self._is_locked = False

    async def _end_update(self, version: int | None = None) -> bool:
        """Note that the step's update, if there was one, made `version` (None: the policy is as before).

        Returns whether the engine is to be sent the weights.
        """
        if self._loaded and version is not None:
            self.schedule, self._loaded = self.schedule.restart(version), False
            return True
        if self.schedule.updating:
            self.schedule = self.schedule.updated(self.schedule.version if version is None else version)
        return self.schedule.publish_is_due

    async def _begin_update(self) -> None:
        """Have the policy's weights changed from now on."""
        if self._in_flight:
            self._admit()
            await self._lock()
        else:
            await self._pause()

    async def _lock(self) -> None:
        """Have an engine that samples on read the policy's weights no more."""
        if self._in_flight:
            await self.rollouts.lock_weights()
            self._is_locked = True

    async def _pause(self) -> None:
        """Hold an engine that has requests of groups that continue, or that people ask."""
        if self.schedule.is_open or self.rollouts.serves_people:
            self._is_paused = True
            await self.rollouts.pause()

    async def _resume(self) -> None:
        self._is_paused = False
        await self.rollouts.resume()

    def _admit(self) -> None:
        """Begin all prompts that may begin: not one while batches of an earlier process wait to be taken again."""
        if self.record.plan:
            return
        loaded = [group.ordinal for group in self.schedule.groups if group.ordinal not in self._running]
        if loaded:
            self.schedule = self.schedule.reset(loaded)
        for ordinal in loaded:
            self._begin(ordinal)
        while not self._is_paused and self.schedule.can_admit and self.schedule.next_ordinal < self.prompts.end:
            ordinal = self.schedule.next_ordinal
            self.schedule = self.schedule.admit()
            self._begin(ordinal)

    def _begin(self, ordinal: int) -> None:
        sample = self.prompts[ordinal]
        if (ended := self.record.journal.ended.get(ordinal)) is not None:  # in a process before
            self.schedule = self.schedule.restore(ordinal, ended.outcome, ended.oldest)
            if all(one.ordinal != ordinal for one in self.schedule.groups if one.outcome is None):
                self.record.found += 1
                self._running[ordinal] = None
                return
            self.record.forget(ordinal)
        self.schedule = self.record.resumed(self.schedule, ordinal)
        step, number = self.schedule.place(ordinal)
        work = PromptTask(ordinal, sample, training(self.config, step), number)
        self._running[ordinal] = asyncio.create_task(self._run(work))

    async def _run(self, work: PromptTask) -> None:
        def on_begin(version: int) -> None:
            if not self.record.has_turns(work.ordinal):
                self.schedule = self.schedule.begin(work.ordinal, version)

        try:
            with leaked_cancellation_fails(f"prompt {work.ordinal}"):
                log = self.record.log(work, self._fail)
                ended = await self.rollouts.run_group(work, on_begin, self._trajectory_ended, log)
            self.schedule, _ = self.schedule.finish(ended.ordinal, ended.outcome, ended.oldest)
            self.record.ended(ended)
            self._admit()
        except Exception as error:
            self._fail(error)
        self._changed.set()

    def _takes_version(self, ordinal: int, version: int) -> bool:
        """Let tokens of an open group be as old as `version`, which is not served any more; False: no batch could train
        on them in time."""
        before = self.schedule
        self.schedule = before.restore(ordinal, None, version) if version <= before.version else before
        return self.schedule is not before

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    def _trajectory_ended(self) -> None:
        if self._on_end is not None:
            self._on_end()
        if self._lane is not None:
            open_ones = sum(group.outcome is None for group in self.schedule.groups)
            self._lane.advance(1, open=open_ones, ready=len(self.schedule.groups) - open_ones)

    async def _cancel(self) -> None:
        """End all that has begun and was not taken; raises nothing of it."""
        await self._stop()
        self.schedule, statuses = self.schedule.cancel()
        self.record.ledger.settle(statuses)

    async def _refuse(self, step: int, failed: set[int]) -> None:
        await self._stop()
        ahead = {
            one.ordinal for one in self.schedule.groups if one.outcome in (GroupStatus.FAILED, GroupStatus.TIMEOUT)
        }
        self.record.refuse(step, sorted(failed | ahead))

    async def _stop(self) -> None:
        running, self._running = self._running, {}
        tasks = [task for task in running.values() if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.rollouts.stop_groups()
        self._error = None

    async def _state(self) -> dict[str, JSON]:
        return self.prompts.state() | {
            "flow": self.schedule.state(),
            "ledger": self.record.ledger.state(),
            "prompts": self.record.prompts(self.schedule, self.prompts.__getitem__),
        }

    async def _saved(self) -> None:
        self.record.drop()

    async def _load(self, state: Mapping[str, JSON]) -> None:
        await self._stop()
        settings, schedule, step = self.schedule.settings, state.get("flow"), state.get("step", 0)
        if schedule is None:
            taken = step if isinstance(step, int) else 0
            self.schedule = StalenessScheduler(settings, step=taken, next_ordinal=taken * settings.batch_size)
        else:
            self.schedule = StalenessScheduler.load(settings, as_mapping(schedule))
        begun, most = len(self.schedule.groups), (1 + settings.depth) * settings.batch_size
        if begun and not settings.depth:
            raise DataError(
                f"the checkpoint was made with async_training.max_staleness above 0 and holds {begun} prompts that "
                "were begun and not trained on: go on with async_training.max_staleness=1 or more, or start anew with "
                "trainer.resume_mode=disable"
            )
        if begun > most:
            raise DataError(
                f"the checkpoint holds {begun} prompts that were begun and not trained on, and "
                f"with async_training.depth={settings.depth} at most {most} may be: set async_training.depth and "
                "max_staleness as they were when it was made, or higher"
            )
        self.prompts.load(state, self.schedule.next_ordinal)
        self.record.load(state, self.schedule)
        if not settings.depth:  # a step counts the prompts that it began alone
            self.schedule, statuses = self.schedule.cancel()
            self.record.ledger.settle(statuses)
        self._loaded = True


def measured(schedule: StalenessScheduler, record: Record, versions: Counter[int], current: int) -> Numbers:
    """Count prompts that run during the update; `versions`: tokens of the batch by version, `current`: the policy's."""
    numbers: Numbers = {
        "async/publish_lag": float(publish_lag(current, schedule.served)),
        "async/open": float(sum(group.outcome is None for group in schedule.groups)),
        "async/ready": float(sum(group.outcome is not None for group in schedule.groups)),
        "async/trained": float(record.ledger.counts[PromptStatus.TRAINED]),
        "async/journal_bytes": float(record.journal.size),
        "async/turns_resumed": float(record.turns),
        "async/begun_anew": float(record.journal.anew),
    }
    if tokens := versions.total():
        ages = {staleness(version, current): count for version, count in versions.items()}
        numbers["async/staleness_mean"] = sum(age * count for age, count in ages.items()) / tokens
        numbers["async/staleness_max"] = float(max(ages))
    return numbers
