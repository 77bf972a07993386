"""The life of a run, the same for every training: resume, validate, train, survive workers' deaths, save, export."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from agentrl.checkpoint.export import export_policy
from agentrl.checkpoint.manager import reading_state, step_in
from agentrl.checkpoint.recovery import Continuation, step_to_export
from agentrl.checks.runner import ALARMS_FILE
from agentrl.config import config_to_dict
from agentrl.config.sections.trainer import RunConfig, TrainerConfig
from agentrl.errors import TrainingError, WorkerDied
from agentrl.runtime.executor import Executor
from agentrl.runtime.profiler import nvtx_range, profile_of
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Numbers
from agentrl.system.publish import published
from agentrl.system.termination import Terminated, allow, within_time
from agentrl.trainer.observer import Observers, StepDone
from agentrl.trainer.setting import ConfigT, RunSetting
from agentrl.workers.groups import TrainableGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
ENDED_FILE = "ended.txt"
"""Why a run ended before its last step."""


class Training(ABC, Generic[ConfigT]):
    """One kind of training, which a run drives a step at a time."""

    def __init__(
        self,
        setting: RunSetting[ConfigT],
        executor: Executor,
        groups: Mapping[str, TrainableGroup],
        export: Callable[[Path, PreTrainedTokenizerBase], None],
    ) -> None:
        """Args:
        groups: the models that learn, by their folders in a checkpoint.
        export: writes the trained model and the tokenizer in Hugging Face format.
        """
        self.setting, self.config, self.display = setting, setting.config, setting.display
        self.dir, self.executor, self.groups, self.export = setting.folder.path, executor, groups, export
        self.observers = Observers([])
        self.evaluated: Mapping[str, int] = {}
        """By check, how often it compared something since the run began."""
        self.step = 0
        """Steps done, or the number of the one that is trained."""
        self.seconds: Numbers = {}
        """Seconds of stages, by `time/<name>`, since a subclass emptied it."""
        self.validated: Numbers = {}
        """Metrics of the last validation; empty before the first."""
        self.whole: dict[str, JSON] | None = None
        """State after the last step that is whole; None before the first, and while an update changes the policy."""

    @abstractmethod
    def take_step(self, *, validates: bool) -> StepDone:
        """Train the step `self.step`, validate with the new weights if asked, and report both."""

    @abstractmethod
    def validate_first(self) -> StepDone:
        """Validate before any step, and report it. No metrics where there is nothing to validate on."""

    @abstractmethod
    def tell_end(self) -> None:
        """Show the files that the run leaves."""

    def state(self) -> dict[str, JSON]:
        """Collect the contents of a checkpoint apart from the models."""
        return {"step": self.step}

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Continue after the step of a state; the models have its weights already."""
        self.step, self.whole = step_in(state), None

    def restart(self) -> None:
        """End all workers, and make new ones."""
        self.executor.restart()

    def loaded(self) -> None:
        """Use the weights that were loaded."""

    def saved(self) -> None:
        """Forget what only the checkpoints before needed."""

    @contextmanager
    def timed(self, name: str, *, shown: bool = True) -> Iterator[None]:
        """Time a stage into `time/<name>`, in seconds; show it, unless it shows its own progress. Profiled if asked."""
        began, keys = time.perf_counter(), self.config.trainer
        if keys.profile_steps:
            self.executor.profile_with(profile_of(keys, self.dir, self.step, name))
        try:
            with self.display.stage(name.replace("_", " ")) if shown else nullcontext(), nvtx_range(name):
                yield
        finally:
            if keys.profile_steps:
                self.executor.profile_with(None)  # what follows a worker's death is no part of the stage
        self.seconds[f"time/{name}"] = time.perf_counter() - began


class TrainingRun(Generic[ConfigT]):
    """An open training. Iterating trains: each item is the metrics of the step that was just done.

    A new iteration continues where an earlier one was left. When the iteration is exhausted, the work after the last
    step is done (the policy is exported). A run that is closed before continues, later, from its newest checkpoint.
    """

    def __init__(self, training: Training[ConfigT]) -> None:
        self._setting = setting = training.setting
        self.training, self.total_steps = training, setting.total_steps
        """The step after which the run ends."""
        self.config, self.dir = setting.config, setting.folder.path
        """The config, with the paths of files made for the quickstart, and the run's folder."""
        self._checkpoints, self._display, self._folder = setting.checkpoints, setting.display, setting.folder
        self._keys: RunConfig = setting.config.trainer
        self._of_rl = self._keys if isinstance(self._keys, TrainerConfig) else None
        self._only_validates = self._of_rl is not None and self._of_rl.val_only
        self._continuation = Continuation(self._keys, training.restart, setting.checkpoints, setting.begun_from)
        self._first = training.state()
        self._saved = 0
        """Step of the newest checkpoint."""
        self._is_over = False
        """The work after the last step is done."""
        self._steps = self._train()

    @property
    def step(self) -> int:
        """Steps done, including steps before a resume; 0 before the first, and until the iteration begins."""
        return self.training.step

    @property
    def validation(self) -> dict[str, float]:
        """Metrics of the last validation; empty before the first."""
        return self.training.validated

    @property
    def evaluated(self) -> dict[str, int]:
        """By check (docs/reliability.md), how often it compared something since the run began; others never did."""
        return dict(self.training.evaluated)

    def __iter__(self) -> Iterator[dict[str, float]]:
        """Raises TrainingError where an error, an interruption or a `close` has ended the training before its end."""
        if not self._is_over and inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED:
            raise TrainingError(
                f"the training in {self.dir} was closed, interrupted or ended by an error, so it takes no more steps. "
                "Open it again with the same config: it resumes from its newest checkpoint (trainer.save_freq), or "
                "begins again with trainer.resume_mode=disable"
            )
        return self._steps

    def close(self) -> None:
        """Wait for checkpoints that are being written. Iterating ends here."""
        self._steps.close()

    def _train(self) -> Generator[Numbers, None, None]:
        """Resume, validate if asked, train to the last step, and export the policy. Yields each step's metrics.

        Closing the generator between two steps waits for the checkpoints that are being written. An interruption is
        raised with a note of the checkpoint that the run would resume from; SIGTERM after a checkpoint, if there is
        time.
        """
        training, keys = self.training, self._of_rl
        try:
            self._resume()
            if self._only_validates or (self.step == 0 and self._keys.val_before_train):
                while (validated := self._surviving(training.validate_first)) is None:
                    pass
                self._checkpoints.best.is_named_in(validated.metrics)
                self._stop_if_asked(validated)
            if not self._only_validates:
                self._begin()
                with self._display.stage("train", total=self.total_steps, done=self.step) as stage:
                    ended = None
                    while not ended:
                        before, step = training.step, None
                        if before == self.total_steps:
                            ended = self._surviving(self._export)
                        else:
                            step = self._surviving(self._take_step)
                        stage.advance(training.step - before, **({} if step is None else step.shown))
                        if step is not None:
                            yield step.metrics
            training.tell_end()
            self._is_over = True
        except GeneratorExit:
            self._checkpoints.settle()
            raise
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated) and keys is not None:
                self._save_in_time(keys.preemption_seconds)
            interrupt.add_note(self._continuation.resume_hint())
            raise

    def _begin(self) -> None:
        """Begin to count the time of the next step. A run that is over already only exports its policy.

        Raises TrainingError for a budget that is spent before the first step.
        """
        if (budget := self._setting.budget) is not None:
            budget.begin(self.step)
        over = self._checkpoints.best.over or (None if budget is None else budget.over)
        if over is not None:
            self._end(over)

    def _end(self, why: str) -> None:
        """Make the step that was done the last one."""
        total, self.total_steps = self.total_steps, self.step
        if self.step < total:
            text = f"ended after step {self.step} of {total}: {why}"
            self._display.note(text)
            with published(self.dir / ENDED_FILE) as partial:
                partial.write_text(text + "\n", encoding="utf-8")

    def _surviving(self, work: Callable[[], T]) -> T | None:
        """Do some work. After a worker's death make new workers, load the last state that this process saved, or began
        with, and return None.

        Raises WorkerDied when the run has resumed often enough.
        """
        try:
            return work()
        except WorkerDied as death:
            death = self._continuation.after(death, self._load)
            if not self._only_validates:
                self._forget_after(self.step)
            self._display.warn(f"{death}; new workers go on after step {self.step}")
            if not self._only_validates:
                self._begin()  # the lost time is no step's, and may have used up the budget
            return None
        except Exception:
            with suppress(Exception):  # the error that ended the run is the one to tell
                self._checkpoints.settle()
            raise

    def _take_step(self) -> StepDone:
        """Train one step; validate, report and save as far as it is due.

        From the update on SIGTERM waits for the end of the step, and not longer than `trainer.preemption_seconds`.
        """
        training, keys, total = self.training, self._keys, self.total_steps
        training.step += 1
        try:
            step = training.take_step(validates=validation_due(keys, training.step, total))
            training.whole = training.state()
            if (budget := self._setting.budget) is not None:
                training.whole["budget"] = budget.state()
            # Here, as the checkpoint that a SIGTERM asks for has to know of this step.
            is_best = self._checkpoints.best.take(training.step, step.metrics)
        finally:
            allow()
        # The save of an earlier step may have reached the disk meanwhile: then it counts from now on.
        self._checkpoints.settle(wait=False)
        is_due = (keys.save_freq > 0 or self._of_rl is not None) and due(keys.save_freq, training.step, total)
        over = step.stop or self._checkpoints.best.over
        if is_best or is_due or over is not None:
            self._save(training.whole)
        if step.alarm is not None and step.reaction == "checkpoint_then_stop":
            self._save(training.whole)
            self._checkpoints.settle()
        self._stop_if_asked(step)
        if over is not None:
            self._end(over)
        kept = self._checkpoints.steps_kept
        self._folder.retention.remove_oldest(training.step, lambda: {training.step, *kept()})
        return step

    def _stop_if_asked(self, step: StepDone) -> None:
        """Raise TrainingError where the step's alarms ask for it."""
        if step.alarm is not None and step.reaction != "warn":
            raise TrainingError(f"step {step.number}: {step.alarm}. All alarms are in {self.dir / ALARMS_FILE}")

    def _resume(self) -> None:
        """Load the checkpoint that the run resumes from, if there is one, then begin to write into its folder."""
        path = self._continuation.begun_from
        if path is not None:
            self._load(path)
            self._display.note(f"resumed from {path} (step {self.step})")
        after = None if self._only_validates else -1 if path is None else self.step
        self._folder.begin(self._forget_after, self._checkpoints, after)
        (self.dir / ENDED_FILE).unlink(missing_ok=True)

    def _load(self, path: Path | None) -> None:
        """Restore a checkpoint; None: the state in which this process began, where new workers are."""
        state = self._first if path is None else self._checkpoints.load(path)
        if path is not None:
            with self._display.stage("load checkpoint", total=len(self.training.groups)) as stage:
                for name, group in self.training.groups.items():
                    group.load(path / name)
                    stage.advance()
        with nullcontext() if path is None else reading_state(path):
            self.training.restore(state)
            if (budget := self._setting.budget) is not None:
                budget.restore(state.get("budget"))
        self._saved = self.step
        self.training.loaded()

    def _forget_after(self, step: int) -> None:
        """Forget the reports of later steps, which are done again; -1: of all."""
        self.training.setting.tracker.truncate_after(step)
        self.training.observers.forget_after(step)

    def _save(self, state: Mapping[str, JSON], *, goes_on: bool = True) -> None:
        """Save the state that a continued run needs; published now or, in the background, when it is written.

        `state`: of the step that the models are after. Not `goes_on`: later records are needed, too.
        """
        background = self._checkpoints.background
        writers = {name: partial(group.save, background=background) for name, group in self.training.groups.items()}
        with self.training.timed("save"):
            self._checkpoints.save(step_in(state), writers, {**state, "config": config_to_dict(self.config)})
            self._saved = step_in(state)
            if goes_on:
                self.training.saved()

    def _save_in_time(self, seconds: float) -> None:
        """Save the last step that is whole, unless it is saved, or an update was left half done, or time runs out."""
        whole = self.training.whole
        try:
            with within_time(seconds):
                if whole is not None and step_in(whole) > self._saved and seconds:
                    self._save(whole, goes_on=False)
                self._checkpoints.settle()
        except (Exception, Terminated) as error:  # the run ends anyway, and goes on from the checkpoint before
            self._display.warn(f"no checkpoint was saved at the end: {str(error) or f'{seconds:g} s have passed'}")

    def _export(self) -> bool:
        """Export the policy in Hugging Face format, whole or not at all: of the last step, or of the best one if asked.

        Raises TrainingError when the disk is full.
        """
        self._checkpoints.settle()
        training, checkpoints, step = self.training, self._checkpoints, self.step
        best = step_to_export(self._keys, checkpoints, step)
        if best != step:
            path = checkpoints.best_checkpoint(self._display)
            if path is None:
                self._display.warn(f"the best step's checkpoint ({best}) is not there: policy/ is of step {step}")
            else:
                with self._display.stage("load checkpoint"):
                    training.groups["policy"].load(path / "policy")
                step = best
                self._display.note(f"policy/ is of step {best}, the best by {self._keys.metric_for_best_model}")
        folder = self.dir / "policy"
        export_policy(training.export, training.setting.chat, step, folder, checkpoints.store, self._display)
        return True


def validation_due(config: RunConfig, step: int, total: int) -> bool:
    """Return true every `test_freq` steps and at the last one; with -1 there alone, unless `val_after_train` is off."""
    return due(config.test_freq, step, total) and (config.test_freq > 0 or config.val_after_train)


def due(frequency: int, step: int, total: int) -> bool:
    """Return true every `frequency` steps, and at the last one; -1: only there."""
    return step == total or (frequency > 0 and step % frequency == 0)
