"""A run's budget: minutes, tokens or money, after which it ends as after its last step.

A step begins only where one like the largest of the last steps fits into the rest of the budget. Tokens are counted
along the steps of a checkpoint, so a resumed run ends after the same step. Minutes are counted over kills, too: a file
in the run's folder holds them.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.config.sections.trainer import BudgetConfig, RunConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.observe.display import Display
from agentrl.system.json_value import JSON
from agentrl.system.publish import published
from agentrl.trainer.observer import StepDone

FILE = "budget.json"
RECENT = 10
"""Steps whose largest is expected of the next one."""


class Spent(BaseModel):
    """The spent part of a budget, in a checkpoint's state; budget.json has its minutes."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    minutes: float = Field(0.0, ge=0)
    tokens: int = Field(0, ge=0)
    step_minutes: list[float] = []
    """Minutes of each of the last steps."""
    step_tokens: list[int] = []
    """Tokens of each of the last steps."""


class Budget:
    """The spent and the remaining part of a run's budget."""

    def __init__(
        self, keys: BudgetConfig, file: Path, clock: Callable[[], float] = time.monotonic, *, resumes: bool = True
    ) -> None:
        """Begin to count the minutes. Raises ConfigError for a file that does not hold them.

        file: the minutes of the processes before this one, read where the run `resumes`.
        """
        self.keys, self.file, self._clock = keys, file, clock
        self.tokens = 0
        self._before = _read(file).minutes if resumes and file.exists() else 0.0
        self._began = self._mark = clock()
        self._step_minutes: deque[float] = deque(maxlen=RECENT)
        self._step_tokens: deque[int] = deque(maxlen=RECENT)

    @staticmethod
    def from_config(config: RunConfig) -> Budget | None:
        """Make the budget of `trainer.budget`; None without."""
        keys = config.budget
        if keys == BudgetConfig():
            return None
        resumes = config.resume_mode != "disable"
        return Budget(keys, Path(config.default_local_dir) / FILE, resumes=resumes)

    @property
    def minutes(self) -> float:
        """Minutes that the run's processes have taken, each from the start until now or its last step."""
        return self._before + (self._clock() - self._began) / 60

    @property
    def limits(self) -> dict[str, tuple[float, float, float]]:
        """By key: (the budget, its spent part, the part that a step takes)."""
        keys, minutes, price = self.keys, self.minutes, self.keys.price_per_hour
        step_minutes = max(self._step_minutes, default=0.0)
        found = {}
        if keys.minutes is not None:
            found["minutes"] = (keys.minutes, minutes, step_minutes)
        if keys.tokens is not None:
            largest = max(self._step_tokens, default=0)
            found["tokens"] = (float(keys.tokens), float(self.tokens), float(largest))
        if keys.cost is not None and price is not None:
            found["cost"] = (keys.cost, minutes / 60 * price, step_minutes / 60 * price)
        return found

    @property
    def over(self) -> str | None:
        """Why no further step fits, in words; None where one does."""
        for name, (limit, spent, step) in self.limits.items():
            if spent >= limit or spent + step > limit:
                takes = f", and a step takes up to {step:,.6g}" if step else ""
                return f"trainer.budget.{name}={limit:g} (raise it to train on): {spent:,.6g} are spent{takes}"
        return None

    def check(self, least_tokens: int) -> None:
        """Raise ConfigError where a first step needs more tokens than there are. `least_tokens`: of a step."""
        if self.keys.tokens is not None and self.keys.tokens < least_tokens:
            raise ConfigError(
                f"trainer.budget.tokens={self.keys.tokens} ends the run before its first checkpoint: a step takes "
                f"{least_tokens:,} tokens at least. Raise it, or lower data.train_batch_size"
            )

    def begin(self, step: int) -> None:
        """Begin the first step of this process. Raises TrainingError where nothing is left for the run's first."""
        self._mark, over = self._clock(), self.over
        if over is not None and step == 0:
            earlier = f", {self._before:,.6g} of the minutes by earlier processes ({self.file})" if self._before else ""
            raise TrainingError(
                f"{over} before the first step, by loading models and validating{earlier}. The run has no checkpoint. "
                "Raise the budget, set trainer.val_before_train=false, or start over with trainer.resume_mode=disable"
            )

    def spend(self, step: StepDone, display: Display, save_freq: int) -> None:
        """Count a step and add its metrics. Sets the end of the run (`step.stop`) where no further step fits.

        Warns after the first step when the run will end before the first checkpoint that `save_freq` asks for.
        """
        now = self._clock()
        self._step_minutes.append((now - self._mark) / 60)
        self._step_tokens.append(step.tokens)
        self._mark = now
        self.tokens += step.tokens
        limits, over = self.limits, self.over
        left = min((math.floor((limit - spent) / size) for limit, spent, size in limits.values() if size), default=0)
        step.metrics |= {"budget/minutes": self.minutes, "budget/tokens": float(self.tokens)}
        if self.keys.price_per_hour is not None:
            step.metrics["budget/cost"] = step.metrics["budget/minutes"] / 60 * self.keys.price_per_hour
        if limits:
            step.metrics["budget/steps_left"] = float(max(0, left))
        if over is not None:
            step.stop = step.stop or over
        elif step.number == 1 and limits and 1 + left < save_freq:
            display.warn(
                f"trainer.budget: at the pace of the first step the run ends after step {1 + left}, before its first "
                f"checkpoint by trainer.save_freq={save_freq}. It is saved then, and a kill before loses every step: "
                "lower save_freq, or raise the budget"
            )
        with published(self.file) as partial:
            partial.write_text(json.dumps({"minutes": self.minutes}) + "\n", encoding="utf-8")

    def state(self) -> dict[str, JSON]:
        """Return the part of a checkpoint."""
        return {
            "minutes": self.minutes,
            "tokens": self.tokens,
            "step_minutes": list(self._step_minutes),
            "step_tokens": list(self._step_tokens),
        }

    def restore(self, state: JSON) -> None:
        """Count on from a checkpoint's state; None: of a run without a budget. Minutes never become less.

        Raises ValueError for a state of another form.
        """
        spent = Spent() if state is None else Spent.model_validate(state)
        self.tokens = spent.tokens
        self._step_minutes, self._step_tokens = deque(spent.step_minutes, RECENT), deque(spent.step_tokens, RECENT)
        self._before += max(0.0, spent.minutes - self.minutes)


def _read(file: Path) -> Spent:
    try:
        return Spent.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ConfigError(
            f'{file}: expected {{"minutes": 12.5}}, the minutes that the run has taken, found something else: '
            f"{error.errors()[0]['msg']}. Correct or remove the file"
        ) from error
