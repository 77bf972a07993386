"""Loggers of a run's metrics: metrics.jsonl, tensorboard, wandb.

Invariant of metrics.jsonl: every line but the last is a whole JSON object whose first key is `step`; a line that
`Tracker.log` has returned from is on the disk.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from agentrl.config import config_to_dict
from agentrl.config.registries import LOGGERS
from agentrl.config.section import Section
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import ConfigError, DataError
from agentrl.observe.display import Display
from agentrl.system.publish import disk_full, is_disk_full, published
from agentrl.system.registry import configured
from agentrl.system.user_code import user_code

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run whose metrics are recorded."""

    dir: Path
    """Its folder, which may not exist yet."""
    config: Mapping[str, Any]
    """The whole config, as plain values."""
    project: str
    experiment: str


class Sink(ABC):
    """A logger: one place that metrics go to. Choose one of your own by `trainer.logger`.

    It is made before the run has passed all of its checks: nothing is written before `write` or `truncate_after`.
    """

    def __init__(self, run: RunInfo) -> None:
        """Raises ConfigError for a package that is not installed, say.

        A parameter `options`, annotated with a pydantic model, is given what `trainer.logger_options` has for it.
        """
        self.run = run

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record the metrics of a step; None stands for a number that is not finite."""

    @abstractmethod
    def truncate_after(self, step: int) -> None:
        """Forget the steps after `step`, which a resumed run does again; -1: all. Called once, before any `write`."""

    @abstractmethod
    def close(self) -> None:
        """End what was begun; the run is over."""


class Tracker:
    """Sends each step's metrics to every logger named."""

    def __init__(
        self, names: Sequence[str], options: Mapping[str, Mapping[str, Any]], run: RunInfo, display: Display
    ) -> None:
        """Make the loggers (`trainer.logger`, `trainer.logger_options`); they write nothing yet. Raises ConfigError."""
        self._display = display
        self._warned: set[str] = set()
        self._sinks: dict[str, Sink] = {}
        for name in names:
            key = f"trainer.logger_options.{name}"
            make = configured(LOGGERS.get(name), options.get(name, {}), key)
            with user_code(f"logger {name}", LOGGERS.get(name)):
                self._sinks[name] = make(run)

    @staticmethod
    def of(trainer: RunConfig, dir: Path, config: Section, display: Display) -> Tracker:
        """The loggers of a run in the folder `dir`, whose whole config is `config`. Raises ConfigError."""
        run = RunInfo(dir, config_to_dict(config), trainer.project_name, trainer.experiment_name)
        return Tracker(trainer.logger, trainer.logger_options, run, display)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step. A number that is not finite is recorded as missing, with a warning the first time.

        Raises TrainingError when the disk is full; earlier lines stay intact.
        """
        clean: dict[str, float | None] = {}
        for name, value in metrics.items():
            number = float(value)
            clean[name] = number if math.isfinite(number) else None
            if clean[name] is None and name not in self._warned:
                self._warned.add(name)
                self._display.warn(f"step {step}: metric {name} is {number}; recorded as null")
        for name, sink in self._sinks.items():
            with user_code(f"logger {name}", sink.write):
                sink.write(step, clean)

    def truncate_after(self, step: int) -> None:
        """Forget the steps after `step`: a resumed run does them again."""
        for name, sink in self._sinks.items():
            with user_code(f"logger {name}", sink.truncate_after):
                sink.truncate_after(step)

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()


class Console(Sink):
    """Each step on the terminal. The display, which the training loop tells of steps itself, does all of it."""

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        return None

    def truncate_after(self, step: int) -> None:
        return None

    def close(self) -> None:
        return None


class JsonLines(Sink):
    """One JSON object a line: {"step": 3, "reward/mean": 0.5, ...}."""

    def __init__(self, run: RunInfo) -> None:
        self._path = run.dir / METRICS_FILE
        self._is_whole = False
        """A last line that a kill has cut off is gone."""

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if not self._is_whole and self._path.exists():
            self._rewrite(read_metrics(self._path))
        self._is_whole = True
        line = (json.dumps({"step": step, **metrics}, allow_nan=False) + "\n").encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                done = 0
                while done < len(line):
                    done += file.write(line[done:])
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(before)
                if is_disk_full(error):
                    raise disk_full(self._path) from error
                raise

    def truncate_after(self, step: int) -> None:
        if self._path.exists():
            self._rewrite([line for line in read_metrics(self._path) if line["step"] <= step])
        self._is_whole = True

    def close(self) -> None:
        return None

    def _rewrite(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if text.encode() != self._path.read_bytes():
            with published(self._path) as temporary:
                temporary.write_text(text, encoding="utf-8")


class Tensorboard(Sink):
    """Event files under `tensorboard/`."""

    def __init__(self, run: RunInfo) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._dir = run.dir / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._dir, purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, math.nan if value is None else value, step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbOptions(BaseModel):
    """Keys of `trainer.logger_options.wandb`; `wandb.init` says what they do."""

    entity: str | None = None
    group: str | None = None
    tags: list[str] = []


class Wandb(Sink):
    """A wandb run; a resumed run goes on in the same one."""

    def __init__(self, run: RunInfo, options: WandbOptions) -> None:
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise _missing("wandb") from error
        self._info, self._options = run, options
        self._run: Run | None = None

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._begin().log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def truncate_after(self, step: int) -> None:
        """Begin the run. wandb keeps what it has: it ignores steps that it saw before."""
        self._begin()

    def _begin(self) -> Run:
        """Not at once, for it writes into the run's folder."""
        if self._run is None:
            import wandb

            info = self._info
            info.dir.mkdir(parents=True, exist_ok=True)
            id_file = info.dir / "wandb_id"
            run_id = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:8]
            id_file.write_text(run_id)
            self._run = wandb.init(
                project=info.project,
                name=info.experiment,
                dir=str(info.dir),
                id=run_id,
                resume="allow",
                config=dict(info.config),
                entity=self._options.entity,
                group=self._options.group,
                tags=self._options.tags or None,
            )
        return self._run

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order. A last line cut off by a kill is left out.

    Raises DataError with the line's number for any other line that is not an object with a `step`.
    """
    found: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(f"{path}, line {number}: not JSON ({error}); delete the line to go on") from error
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise DataError(f"{path}, line {number}: want an object with an integer `step`, found {line[:80]!r}")
        found.append(value)
    return found


def _missing(package: str) -> ConfigError:
    return ConfigError(
        f"trainer.logger names {package}, which is not installed: pip install 'agentrl[{package}]', or leave it out"
    )
