"""The best step of a run by a metric, whose checkpoint is kept, and the end of a run that has not become better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.checkpoint.manifest import Best
from agentrl.system.plugin import nearest


@dataclass(frozen=True, slots=True)
class BestBy:
    """The metric by which the best step's checkpoint is kept."""

    metric: str
    greater: bool
    """The greater value is the better one."""
    patience: int | None = None
    """The run ends after so many values one after another that are not better; None: it does not."""


class BestStep:
    """The best step so far, including steps before the checkpoint that was loaded last."""

    def __init__(self, by: BestBy | None, warn: Callable[[str], object]) -> None:
        self.by, self._warn = by, warn
        self.found: Best | None = None
        self.over: str | None = None
        """Why the run ends, in words; None where it goes on."""
        self._told_missing = False

    def take(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take note of a step's metrics. Return true when it is the best so far: it is to be saved then."""
        by = self.by
        if by is None or not self.is_named_in(metrics):
            return False
        value = float(metrics[by.metric])
        found = self.found
        if math.isfinite(value):
            new = Best(step=step, metric=by.metric, greater=by.greater, value=value)
            if new.beats(found):
                self.set(new)
                return True
        if found is not None:
            self.set(found.model_copy(update={"worse": found.worse + 1}))
        return False

    def set(self, found: Best | None) -> None:
        """Continue from the best step that a checkpoint records. Another metric or direction begins again."""
        by = self.by
        self.found, self.over = None, None
        if by is None or found is None or (found.metric, found.greater) != (by.metric, by.greater):
            return
        self.found = found
        if by.patience is not None and found.worse >= by.patience:
            self.over = (
                f"trainer.early_stopping_patience={by.patience} (raise it to train on): {by.metric} was measured "
                f"{found.worse} times since step {found.step}, its best with {found.value:.6g}"
            )

    def is_named_in(self, metrics: Mapping[str, float]) -> bool:
        """Say whether the best step is chosen by one of `metrics`.

        Warns once when others of its group are there and it is not, e.g. in a validation's metrics.
        """
        if self.by is None or self.by.metric in metrics:
            return self.by is not None
        wanted = self.by.metric
        group = sorted(name for name in metrics if name.partition("/")[0] == wanted.partition("/")[0])
        if group and not self._told_missing:
            self._told_missing = True
            self._warn(
                f"trainer.metric_for_best_model={wanted} is not measured{nearest(wanted, group)}; there are "
                f"{', '.join(group)}"
            )
        return False
