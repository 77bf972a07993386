"""Callbacks of transformers as observers of steps, and the state that they and reward functions are given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError
from agentrl.observe.tracking import read_metrics
from agentrl.trainer.observer import Step, StepDone, StepObserver
from agentrl.trl.names import REWARD
from agentrl.trl.names_of_trl import advice

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_callback import TrainerControl

    from agentrl.trl.config import GRPOConfig

CALLED = ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")
"""Events of a callback that are called."""
ALWAYS = ("self", "args", "state", "control")
"""Parameters of each event, in their order."""
GIVEN = {"on_log": ("logs",), "on_evaluate": ("metrics",)}
"""Further arguments of events."""
WITHOUT = ("model", "processing_class", "tokenizer", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""Arguments that transformers gives, and that are not here."""
QUIET = ("on_init_end",)
"""Events that are not called and change no training."""
NAMES = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "learning_rate": "actor/lr",
    "grad_norm": "actor/grad_norm",
    "loss": "actor/loss",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "frac_reward_zero_std": "group/zero_variance",
    "completions/mean_length": "response/sampled_mean",
    "completions/max_length": "response/sampled_max",
    "completions/clipped_ratio": "status/length",
    "tools/call_frequency": "tool/calls_mean",
    "tools/failure_frequency": "tool/error_rate",
    "step_time": "time/step",
}
"""Our metrics by TRL's names for them."""


def in_trls_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add TRL's names for the metrics that it has, too; ours stay."""
    found = {theirs: metrics[ours] for theirs, ours in NAMES.items() if ours in metrics}
    prefix = f"score/{REWARD}"
    found |= {
        f"rewards/{name[len(prefix) :]}/mean": value for name, value in metrics.items() if name.startswith(prefix)
    }
    logged = {name.removeprefix("score/"): value for name, value in metrics.items() if name.startswith("score/")}
    return {**metrics, **{name: value for name, value in logged.items() if name not in ("mean", *found)}, **found}


def made(callbacks: Sequence[TrainerCallback | type[TrainerCallback]]) -> list[TrainerCallback]:
    """Make an object of each callback that is a class."""
    return [one() if isinstance(one, type) else one for one in callbacks]


class Callbacks(StepObserver):
    """Calls users' callbacks, keeps `state.log_history`, and ends the run where a callback asks for it."""

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback],
        args: GRPOConfig,
        state: TrainerState,
        *,
        updates: int,
        log_every: int,
        save_every: int,
        steps_per_epoch: int,
        file: Path,
    ) -> None:
        """Args:
        updates: optimizer steps of a step.
        log_every, save_every: steps between two logs and two saves; -1: only at the end.
        steps_per_epoch: steps in a pass over the rows.
        file: the run's metrics, from which a run that resumes has its history.

        Raises ConfigError for a callback with an event that is never called.
        """
        from transformers.trainer_callback import TrainerControl

        self._callbacks: list[TrainerCallback] = []
        self._args, self._state, self._control = args, state, TrainerControl()
        self._updates, self._log_every, self._save_every = updates, log_every, save_every
        self._steps_per_epoch, self._file = steps_per_epoch, file
        self._kept: list[Mapping[str, float]] = []
        self._has_begun = False
        for one in callbacks:
            self.add(one)

    def add(self, callback: TrainerCallback) -> None:
        """Add a callback. Raises ConfigError for one that cannot be called here as transformers calls it."""
        from transformers import TrainerCallback

        where = f"callbacks[{len(self._callbacks)}]"
        if not isinstance(callback, TrainerCallback):
            raise ConfigError(f"{where}: expected an object of a TrainerCallback, found {callback!r:.100}")
        for event in dir(TrainerCallback):
            own = getattr(type(callback), event)
            if not event.startswith("on_") or own is getattr(TrainerCallback, event) or event in QUIET:
                continue
            where_event = f"{where}, {type(callback).__name__}.{event}"
            if event not in CALLED:
                raise ConfigError(
                    f"{where_event}: agentrl calls {', '.join(CALLED)}; for "
                    "other moments of a step write an observer: overrides={'trainer.observers': [...]} "
                    "(docs/extending.md)"
                )
            _check_parameters(where_event, inspect.signature(own), GIVEN.get(event, ()))
        self._callbacks.append(callback)

    def remove(self, callback: TrainerCallback) -> None:
        """Remove a callback."""
        self._callbacks.remove(callback)

    @property
    def control(self) -> TrainerControl:
        """Wishes of the callbacks."""
        return self._control

    def begin(self) -> None:
        """Begin a training, perhaps the trainer's second one: with an empty history, and no wish to stop."""
        self._has_begun, self._kept = False, []
        self._control.should_training_stop = False
        self._state.log_history = []

    def call(self, event: str, **given: object) -> None:
        """Call an event of every callback. Raises ConfigError for a wish that the run cannot meet."""
        for one in self._callbacks:
            found = getattr(one, event)(self._args, self._state, self._control, **given)
            self._control = self._control if found is None else found
            for wish in ("should_save", "should_evaluate", "should_log", "should_epoch_stop"):
                if getattr(self._control, wish):
                    raise ConfigError(
                        f"callback {type(one).__name__}: control.{wish} is not here; control.should_training_stop is. "
                        "Saves, validations and logs are due by save_steps, eval_steps and logging_steps"
                    )

    def on_first_validation(self, step: StepDone) -> None:
        self._evaluated_in(step)

    def on_rollout(self, step: Step) -> None:
        self._at(step.number - 1)
        self.call("on_step_begin")

    def on_published(self, step: Step) -> None:
        self._at(step.number)  # for the validation, too

    def on_end(self, step: Step) -> None:
        """Call the events of a step's end: step, log, evaluation, save."""
        state, number = self._state, step.number
        self.call("on_step_end")
        is_last = state.global_step >= state.max_steps
        self._kept.append(step.metrics)
        if self._logs_after(number):
            self.log(_means(self._kept))
            self._kept = []
        self._evaluated_in(step)
        if (self._save_every > 0 and number % self._save_every == 0) or is_last:
            self.call("on_save")
        if self._control.should_training_stop and not is_last:
            step.stop = "a callback asked for it (control.should_training_stop)"

    def log(self, numbers: Mapping[str, float]) -> None:
        """Add an entry to the history, and call the callbacks."""
        self.call("on_log", logs=self._entered(in_trls_names(numbers)))

    def evaluated(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log the numbers of a validation, under TRL's prefix; return them."""
        found = _of_validation(metrics)
        self._entered(found)
        self.call("on_evaluate", metrics=found)
        return found

    def _evaluated_in(self, step: StepDone) -> None:
        if validated := _validated(step.metrics):
            self.evaluated(validated)

    def _logs_after(self, number: int) -> bool:
        first = number == 1 and bool(self._args.logging_first_step)
        return (self._log_every > 0 and number % self._log_every == 0) or first

    def _entered(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Add numbers to the history, with the step that they are of."""
        entry = {**numbers, "epoch": self._state.epoch or 0.0, "step": self._state.global_step}
        self._state.log_history.append(entry)
        return entry

    def forget_after(self, step: int) -> None:
        """Go back to a step. The first call, before any rollout, is the begin of the training."""
        last = max(step, 0)
        self._at(last)
        history = self._state.log_history
        if self._has_begun or last == 0:
            self._state.log_history = [one for one in history if one.get("step", 0) <= self._state.global_step]
            self._kept = []
        else:
            self._recall(last)
        if not self._has_begun:
            self._has_begun = True
            self.call("on_train_begin")

    def _recall(self, last: int) -> None:
        """Enter the steps up to `last` of the run that resumes, as `on_end` entered them."""
        self._state.log_history = []
        newest = 0
        for line in read_metrics(self._file) if self._file.exists() else ():
            metrics = {name: value for name, value in line.items() if isinstance(value, float | int)}
            number = int(metrics.pop("step"))
            self._at(number)
            if number > newest:  # an equal one is of a validation before a resumed run's first step
                newest = number
                self._kept.append(metrics)
                if self._logs_after(number):
                    self._entered(in_trls_names(_means(self._kept)))
                    self._kept = []
            if validated := _validated(metrics):
                self._entered(_of_validation(validated))
        self._at(last)

    def _at(self, step: int) -> None:
        """Say in the state how many steps are done."""
        self._state.global_step, self._state.epoch = step * self._updates, step / self._steps_per_epoch


def _validated(metrics: Mapping[str, float]) -> dict[str, float]:
    """Choose the numbers of a validation."""
    return {name: value for name, value in metrics.items() if name.startswith("val/")}


def _of_validation(metrics: Mapping[str, float]) -> dict[str, float]:
    """Name the numbers of a validation as TRL does."""
    found = {f"eval_{name.removeprefix('val/')}": value for name, value in metrics.items()}
    if "val/reward_sampled" in metrics:
        found["eval_reward"] = metrics["val/reward_sampled"]
    return found


def _check_parameters(where: str, asked: inspect.Signature, given: Sequence[str]) -> None:
    """Raise ConfigError where an event asks for what it would not be given, perhaps hours later."""
    named = [one for one in asked.parameters.values() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    for one in named[len(ALWAYS) :]:
        if one.name in given:
            continue
        if one.name in WITHOUT or one.default is one.empty:
            instead = advice(one.name) or "it is given args, state and control, and on_log logs, on_evaluate metrics"
            raise ConfigError(f"{where} asks for {one.name}: {instead}")


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each number over the steps that have it."""
    names = {name for one in steps for name in one}
    found = {name: [one[name] for one in steps if name in one] for name in sorted(names)}
    return {name: math.fsum(values) / len(values) for name, values in found.items()}
