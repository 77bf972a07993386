"""The source of a training's trajectories, at every bound.

`agentrl.rollouts.staleness_scheduler` decides which prompts may begin and which batch takes them. Only the rollouts
know where they run: in this process or in workers under Ray.

With `async_training.max_staleness=0` rollouts and updates take turns (`agentrl.rollouts.dynamic_sampling`). Nothing
outlives a step, so no ledger and no journal is written.

With a bound above 0 trajectories continue while the policy is updated. Groups are tasks on an event loop then, and the
whole schedule runs on the loop's thread, so nothing is locked. An engine with devices of its own samples while the
policy is updated, and takes new weights while its requests run. Any other engine shares its processor, or its memory,
with the update. It is held, and its KV cache is dropped, from taking a batch until the next one is asked for. Tools
continue meanwhile. The samples of an embedded engine depend on the order of events on the loop alone, not on how long
updates take. Where tools answer on the loop, too, the numbers of a run replay.

docs/async.md lists its metrics `async/*`, and docs/algorithms.md `refill/*` (dynamic sampling).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from agentrl.checks.report import Report
from agentrl.config import Config
from agentrl.data.loader import Loader
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import DataError, TrainingError
from agentrl.rollouts.contract import Log, PromptTask, Rollout, RolloutRunner, Task, training, validation
from agentrl.rollouts.dynamic_sampling import fill_batch, most_failed, replaced, shortage
from agentrl.rollouts.journal import identity, validity
from agentrl.rollouts.prompts import Prompts
from agentrl.rollouts.record import Record
from agentrl.rollouts.staleness_scheduler import Batch, NotReady, PromptStatus, Settings, StalenessScheduler
from agentrl.system.call_journal import Entry
from agentrl.system.cancellation import leaked_cancellation_fails
from agentrl.system.json_value import JSON, as_list, as_mapping, as_object
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
        draw_size = config.data.draw_size if filters.refill else None
        return Settings(batch, sys.maxsize, replaces=filters.refill, draw_size=draw_size)
    drawn = filters.max_num_gen_batches * config.data.draw_size
    left = max(drawn - batch, 0) if filters.refill and drawn else None
    return Settings(batch, total_steps, keys.max_staleness, keys.depth, keys.publish_every, filters.refill, left)


class AsyncSource:
    """`TrajectorySource` that begins trajectories of later steps before a step's update has ended, as far as the bound
    allows: with 0 it takes turns.
    """

    def __init__(
        self, config: Config, loader: Loader, rollouts: RolloutRunner, settings: Settings | None = None
    ) -> None:
        """`settings`: see `settings_of`; None: the settings of a bound of 0."""
        settings = settings_of(config, 0) if settings is None else settings
        self.config, self.loader, self.rollouts, self.loop = config, loader, rollouts, rollouts.loop
        self.schedule, self.max_staleness = StalenessScheduler(settings), settings.max_staleness
        self.prompts = Prompts(loader)
        fsync = config.async_training.journal_fsync
        self.record = Record(rollouts.run_dir, validity(config), rollouts.reporter.note, fsync=fsync)
        self._running: dict[int, asyncio.Task[None] | None] = {}
        """Groups that were begun; None: it had ended in a process before."""
        self._changed = asyncio.Event()
        rollouts.on_loss = self._changed.set
        self._error: BaseException | None = None
        """The error that ended a group."""
        self._is_paused = self._loaded = False
        self._is_locked = False
        """An engine that samples on may not read the weights: an update may have changed them."""
        self._idle = _Idle(rollouts)
        self._weights: Weights | None = None
        """Weights that `publish` was last given."""
        self._numbers: Numbers = {}
        self._ordinals: Sequence[int] = ()
        """Prompts of the step, in the order of the groups of its outlines."""
        self._on_end: Callable[[], None] | None = None
        """Called when a trajectory of training has ended, while a batch is waited for."""
        self._shown = ExitStack()
        self._lane: Progress | None = None
        """The rollouts' own line on the display, next to the trainer's stages."""

    @property
    def needs_weights(self) -> bool:
        return self.rollouts.needs_weights

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        self.rollouts.fill_rewards(files, outlines)

    def sleep(self) -> None:
        self.rollouts.sleep()

    def checked(self) -> Report:
        return self.rollouts.checked()

    def updated(self, outlines: Sequence[Outline]) -> None:
        if self.loader.learns:
            self.prompts.update(self._ordinals, outlines)
        if self.schedule.updating:  # it made no weights
            self.loop.run(self._end_update())

    def next_batch(self, step: int, *, show: bool = False) -> Rollout:
        """Wait for the batch of `step`: groups that are due first, in the order of their prompts.

        Raises TrainingError when too many groups were replaced.
        """
        task, settings = training(self.config, step), self.schedule.settings
        if not settings.max_staleness:
            if self.schedule.updating:  # no update came, and another batch is asked for
                self.loop.run(self._end_update())
            first = self.schedule.next_ordinal
            self.schedule, rollout, self._numbers = fill_batch(
                self.config, self.schedule, self.prompts, self.rollouts, task, show=show
            )
            self._ordinals = range(first, self.schedule.next_ordinal)
            return rollout
        self.record.begin()
        # In flight, others begin when this batch is taken.
        ahead = settings.batch_size if self.rollouts.in_flight_updates and step < settings.last_step else 0
        batch: Batch | None = None
        while batch is None:
            # Here, not on the loop: a data set of a user's, and processes that are made, belong to this thread.
            self.prompts.draw_to(self.schedule.next_ordinal + max(self.schedule.room, 0) + ahead)
            self.record.check_prompts(self.prompts.__getitem__, self.prompts.end)
            if self.rollouts.is_broken:
                self.loop.run(self._unlock())
                self.rollouts.replace_dead_workers()
            batch = self.loop.run(self._next(task))
        version, self._ordinals = self.schedule.version, batch.ordinals
        rollout = self.rollouts.pack(task, batch.ordinals, self.record.journal, show=show)
        if rollout.versions and staleness(min(rollout.versions), version) > settings.max_staleness:
            oldest = min(rollout.versions)
            raise RuntimeError(f"a token of version {oldest} is too old for version {version}: {settings}")
        self._numbers |= measured(self.schedule, self.record, rollout.versions, version)
        return rollout

    def validate(
        self, samples: Sequence[Sample], step: int, *, greedy: bool, show: bool = False, first: int = 0
    ) -> Rollout:
        """See `TrajectorySource`. Training trajectories continue during the call; no trajectory begins."""
        task = validation(self.config, step, greedy=greedy, first=first)
        self.loop.run(self._end_update())
        if self.schedule.served != self.schedule.version and self._weights is not None:
            self._send(self._weights)
        self.loop.run(self._unlock())
        try:
            return self.rollouts.run(
                task, samples, first, show=show, before=self._begin_validation, after=self._end_validation
            )
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

    @property
    def served(self) -> int:
        return self.schedule.served

    def metrics(self) -> Metrics:
        metrics = self.rollouts.metrics()
        metrics.add(self._numbers)
        if self.loader.has_metrics:
            metrics.add(self.loader.metrics())
        return metrics

    def state(self) -> dict[str, JSON]:
        """Return schedule and ledger, and the position in the data before the oldest prompt that no batch has taken.

        With a bound of 0 that is the loader's: between two steps nothing is begun.
        """
        if not self.max_staleness:
            return {"loader": self.prompts.state()["loader"]}
        return self.loop.run(self._state())

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Resume where the state was taken, with the records made after it (see `agentrl.rollouts.record`).

        Prompts that had begun and not ended continue with the weights of `publish`. Raises DataError when the data
        differ, the ledger disagrees with them, or more prompts had begun than the settings allow.
        """
        if not self.max_staleness:
            if begun := as_list(as_object(state.get("flow")).get("groups")):
                raise DataError(
                    "the checkpoint was made with async_training.max_staleness above 0 and holds "
                    f"{len(begun)} prompts that were begun and not trained on: go on with "
                    "async_training.max_staleness=1 or more, or start anew with trainer.resume_mode=disable"
                )
            self.schedule, self._loaded = StalenessScheduler(self.schedule.settings), True
            self.prompts.load({"loader": state["loader"]}, 0)
            return
        self.loop.run(self._load(state))
        if not self.loader.learns:  # such a sampler draws later rows once it has learnt again
            self.prompts.draw_to(max(self.schedule.next_ordinal, self.record.end))
        self.record.check_prompts(self.prompts.__getitem__, self.prompts.end)

    def saved(self) -> None:
        if self.max_staleness:
            self.loop.run(self._saved())

    def report(self) -> str | None:
        """See `TrajectorySource`; None with a bound of 0, where a step's prompts end within it."""
        return self.record.text() if self.max_staleness else None

    def restart_workers(self) -> None:
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
        """Take the batch; None: more prompts must be drawn, or processes replaced, before it can be filled."""
        await self._end_update()
        await self._unlock()
        self._numbers = {}
        if (batch := self.record.again(self.schedule)) is not None:
            self._take(batch, again=True)
            await self._lock()
            return batch
        task = replace(task, name="wait for a batch")
        if self._lane is None:
            self._lane = self._shown.enter_context(self.rollouts.reporter.stage("rollouts"))
        try:
            with self.rollouts.observed(task, None) as self._on_end:
                await self._resume()
                self._admit()
                await self._idle.waits()
                while isinstance(found := self._found(), NotReady):
                    is_short = self.schedule.can_admit and self.schedule.next_ordinal >= self.prompts.end
                    if self.rollouts.is_broken or (is_short and not self._is_paused):
                        return None
                    self._changed.clear()
                    await self._changed.wait()
                self._numbers |= await self._idle.shares()
                self._take(found)
                await self._begin_update()
        except BaseException:
            await self._cancel()
            raise
        finally:
            self._on_end = None
        return found

    def _found(self) -> Batch | NotReady:
        if self._error is not None:
            raise self._error
        if self.schedule.is_exhausted or most_failed(self.config, self.schedule):
            raise TrainingError(shortage(self.config, self.schedule, self.schedule.step + 1))
        return self.schedule.take()

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
        if self.max_staleness and not self.rollouts.in_flight_updates:
            await self._pause()
        self.schedule = self.schedule.resume()
        if self.rollouts.in_flight_updates and self._running:
            self._admit()

    def _send(self, weights: Weights) -> SyncReport:
        """Have the engine, which is held or can do it in flight, sample by `weights`."""
        in_flight = self.max_staleness > 0
        report = self.rollouts.update_weights(weights, self.schedule.version, in_flight=in_flight)
        self._is_locked = False
        self.loop.run(self._published())
        return report

    async def _published(self) -> None:
        self.schedule = self.schedule.publish()
        if self.rollouts.in_flight_updates and self._running:
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
        if self.rollouts.in_flight_updates:
            self._admit()
            await self._lock()
        else:
            await self._pause()

    async def _lock(self) -> None:
        """Have an engine that samples on read the policy's weights no more."""
        if self.rollouts.in_flight_updates:
            await self.rollouts.lock_weights()
            self._is_locked = True

    async def _pause(self) -> None:
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
        sample, size = self.prompts[ordinal], self.schedule.settings.batch_size
        if (ended := self.record.journal.ended.get(ordinal)) is not None:  # in a process before
            self.schedule = self.schedule.restore(ordinal, ended.outcome, ended.oldest)
            if all(one.ordinal != ordinal for one in self.schedule.groups if one.outcome is None):
                self.record.found += 1
                self._running[ordinal] = None
                return
            self.record.forget(ordinal)
        self.schedule = self.record.resumed(self.schedule, ordinal)
        # Names and seeds are those with a bound of 0, where the step's batch is the next one of the data.
        work = PromptTask(ordinal, sample, training(self.config, ordinal // size + 1), ordinal % size)
        self._running[ordinal] = asyncio.create_task(self._run(work))

    async def _run(self, work: PromptTask) -> None:
        journal, prompt = self.record.journal, identity(work.sample)

        def add(entry: Entry) -> None:
            try:
                journal.answered(work.ordinal, prompt, entry)
            except Exception as error:  # a full disk ends the run, and not the trajectory that meets it first
                self._fail(error)
                raise

        def on_begin(version: int) -> None:
            if not self.record.has_turns(work.ordinal):
                self.schedule = self.schedule.begin(work.ordinal, version)

        try:
            with leaked_cancellation_fails(f"prompt {work.ordinal}"):
                log = Log(lambda: journal.entries(work.ordinal), add)
                ended = await self.rollouts.run_group(work, on_begin, self._trajectory_ended, log)
            self.schedule, _ = self.schedule.finish(ended.ordinal, ended.outcome, ended.oldest)
            self.record.ended(ended)
            self._admit()
        except Exception as error:
            self._fail(error)
        self._changed.set()

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

    async def _stop(self) -> None:
        running, self._running = self._running, {}
        tasks = [task for task in running.values() if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.rollouts.stop_groups()

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
        most = (1 + settings.depth) * settings.batch_size
        if len(self.schedule.groups) > most:
            raise DataError(
                f"the checkpoint holds {len(self.schedule.groups)} prompts that were begun and not trained on, and "
                f"with async_training.depth={settings.depth} at most {most} may be: set async_training.depth and "
                "max_staleness as they were when it was made, or higher"
            )
        self.prompts.load(state, self.schedule.next_ordinal)
        self.record.load(state, self.schedule)
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
