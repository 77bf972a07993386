"""The display of a run, in every form (see `agentrl.observe.open`), and the numbers that it shows.

No text of a model, a tool or a file reaches the output raw: every text goes through `excerpt.visible`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Self

from agentrl.observe.excerpt import Reading
from agentrl.system.visible import visible
from agentrl.trajectory import Trajectory

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Column:
    """One number of the step's table."""

    label: str
    keys: tuple[str, ...]
    """The first of these that the metrics hold is shown."""
    style: str
    """Format spec of the value."""
    importance: int
    """Columns with the smallest importance are left out where there is no room for all."""

    def text(self, metrics: Mapping[str, float]) -> str | None:
        """The formatted value, or None when the metrics do not hold it."""
        value = next((metrics[key] for key in self.keys if key in metrics), None)
        return None if value is None else format(value, self.style)


STEP_COLUMNS = (
    Column("reward", ("reward/mean",), ".3f", 100),
    Column("success", ("success/rate",), ".0%", 99),
    Column("tokens", ("response/sampled_mean",), ".0f", 80),
    Column("turns", ("turns/mean",), ".1f", 79),
    Column("calls", ("tool/calls_mean",), ".1f", 78),
    Column("bad calls", ("tool/malformed_rate",), ".0%", 77),
    Column("KL", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), ".4f", 50),
    Column("stale", ("async/staleness_mean",), ".2f", 76),
    Column("engine idle", ("async/engine_idle",), ".0%", 75),
    Column("trainer idle", ("async/trainer_idle",), ".0%", 74),
    Column("entropy", ("actor/entropy",), ".3f", 60),
    Column("grad", ("actor/grad_norm",), ".2f", 61),
    Column("s/step", ("time/step",), ".1f", 90),
    Column("tok/s", ("perf/tokens_per_second",), ".0f", 70),
)
VALIDATION_COLUMNS = (
    Column("sampled", ("val/success_sampled",), ".1%", 2),
    Column("greedy", ("val/success_greedy",), ".1%", 1),
)
"""Success rates."""
SCORE_COLUMNS = (
    Column("score sampled", ("val/score_sampled",), ".3f", 2),
    Column("score greedy", ("val/score_greedy",), ".3f", 1),
)
"""Mean scores, which are shown where they are not the success rates: where scores are graded."""


def score_columns(metrics: Mapping[str, float]) -> tuple[Column, ...]:
    """SCORE_COLUMNS where a validation's scores are graded, else no column."""
    pairs = zip(SCORE_COLUMNS, VALIDATION_COLUMNS, strict=True)
    graded = any(metrics.get(score.keys[0]) != metrics.get(success.keys[0]) for score, success in pairs)
    return SCORE_COLUMNS if graded else ()


def stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each stage of a step, without their total."""
    return {
        key.removeprefix("time/"): value
        for key, value in metrics.items()
        if key.startswith("time/") and key != "time/step" and value > 0
    }


def remark(metrics: Mapping[str, float]) -> str | None:
    """Say why a step's rewards taught the policy nothing, in a sentence; None where they did."""
    if metrics.get("train/sequences", 1.0) > 0:
        return None
    groups, equal = metrics.get("group/groups", 0.0), metrics.get("group/groups_equal", 0.0)
    if not groups:
        return "nothing was learnt: no trajectory is trained on"
    why = "in every group all rewards are equal" if groups == equal else "no sequence has an advantage"
    return f"nothing was learnt from rewards: {why}"


def warn_of_counts(display: Display, counts: Mapping[str, int], of: str) -> None:
    """Warn of each fault found in a part of a whole, e.g. `3 of 10 prompts have a field that nothing reads`.

    counts: the number of items by fault. of: the whole, after the number.
    """
    for what, count in sorted(counts.items()):
        display.warn(f"{count} {of} have {what}")


def note_of_files(display: Display, notes: Mapping[str, str]) -> None:
    """Note once what holds for some files, e.g. `a.jsonl and 2 more files: rows are read as alpaca`."""
    for note in dict.fromkeys(notes.values()):
        first, *more = (file for file, own in notes.items() if own == note)
        display.note(f"{first}{f' and {len(more)} more files' if more else ''}: {note}")


def duration(seconds: float) -> str:
    """4.2 s, 1:07 or 2:03:09."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Stage:
    """A stretch of work with a progress. Made by `Display.stage`; a context manager."""

    def __init__(self, display: Display, name: str, total: int | None, done: int) -> None:
        self.name = visible(name)
        self.total = total
        self.begun_at = done
        self.completed = done
        self.values: dict[str, float] = {}
        self.depth = 0
        self._ended: float | None = None
        self._display = display
        self._started = display.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began; when it is over, its duration."""
        return (self._ended or self._display.clock()) - self._started

    @property
    def remaining(self) -> float | None:
        """Estimated seconds to its end; None when they cannot be estimated, or it is over."""
        done = self.completed - self.begun_at
        if self.total is None or done <= 0 or self._ended:
            return None
        return self.elapsed / done * max(0, self.total - self.completed)

    @property
    def progress(self) -> str:
        """For example `12/340  2.1 s  1:10 left  loss 0.31`."""
        parts = [f"{self.completed}" if self.total is None else f"{self.completed}/{self.total}"]
        if self.total is None and not self.completed:
            parts = []  # it counts nothing
        parts.append(duration(self.elapsed))
        if self.remaining:
            parts.append(f"{duration(self.remaining)} left")
        parts.extend(f"{visible(name)} {value:.4g}" for name, value in self.values.items())
        return "  ".join(parts)

    def advance(self, count: int = 1, **values: float) -> None:
        """`count` more units are done; `values` are numbers to show next to the bar. Safe from any thread."""
        with self._display.lock:
            self.completed += count
            self.values.update(values)
        self._display._stage_advanced(self)

    def __enter__(self) -> Self:
        with self._display.lock:
            self.depth = len(self._display.stages)
            self._display.stages.append(self)
        self._started = self._display.clock()
        self._display._stage_began(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._display.lock:
            self._display.stages.remove(self)
            self._ended = self._display.clock()
        self._display._stage_ended(self, finished=kind is None)


class Display(ABC):
    """The display of one run: `with open_display(title) as display: ...` (see `agentrl.observe.open`).

    Methods may be called before, inside and after the `with`; only inside it is anything animated.
    """

    def __init__(self, title: str, clock: Clock = time.monotonic) -> None:
        self.title = visible(title)
        self.clock = clock
        self.reading: Reading | None = None
        """Needed before `trajectory`."""
        self.stages: list[Stage] = []
        """Running stages, outermost first."""
        self.lock = RLock()

    def stage(self, name: str, total: int | None = None, done: int = 0) -> Stage:
        """A stage to enter with `with`. Stages nest; `done` counts units done before (a resumed run)."""
        return Stage(self, name, total, done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    @abstractmethod
    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a finished training step; of all metrics the important ones are shown."""

    @abstractmethod
    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a finished validation (`val/...`)."""

    @abstractmethod
    def trajectory(self, trajectory: Trajectory, title: str) -> None:
        """One whole trajectory, cut where it is long. Raises ValueError when `reading` has not been set."""

    @abstractmethod
    def note(self, text: str) -> None: ...

    @abstractmethod
    def warn(self, text: str) -> None: ...

    @abstractmethod
    def error(self, text: str) -> None: ...

    @abstractmethod
    def _stage_began(self, stage: Stage) -> None: ...

    def _stage_advanced(self, stage: Stage) -> None:  # noqa: B027 - optional
        """Show the stage's progress, unless the display is drawn again and again."""

    @abstractmethod
    def _stage_ended(self, stage: Stage, finished: bool) -> None: ...

    def _reading(self) -> Reading:
        if self.reading is None:
            raise ValueError("Display.trajectory: set display.reading first (e.g. Reading(chat.shown))")
        return self.reading
