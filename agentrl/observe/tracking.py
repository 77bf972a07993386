"""Where the metrics of a run go: metrics.jsonl, tensorboard, wandb.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from agentrl.errors import ConfigError, DataError
from agentrl.observe.display import Display
from agentrl.system.publish import disk_full, is_disk_full, published

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run

METRICS_FILE = "metrics.jsonl"


class Tracker:
    """Sends each step's metrics to every logger named. `console` is the display's own work; nothing is done here."""

    def __init__(
        self, names: Sequence[str], dir: Path, config: BaseModel, project: str, experiment: str, display: Display
    ) -> None:
        """`names`: of console, jsonl, tensorboard, wandb. Writes nothing yet.

        Raises ConfigError when a package is not installed.
        """
        self._display = display
        self._warned: set[str] = set()
        self._sinks: list[Sink] = []
        if "jsonl" in names:
            self._sinks.append(JsonLines(dir / METRICS_FILE))
        if "tensorboard" in names:
            self._sinks.append(Tensorboard(dir / "tensorboard"))
        if "wandb" in names:
            self._sinks.append(Wandb(dir, config, project, experiment))

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
        for sink in self._sinks:
            sink.write(step, clean)

    def truncate_after(self, step: int) -> None:
        """Forget the steps after `step`: a resumed run does them again."""
        for sink in self._sinks:
            sink.truncate_after(step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class Sink(ABC):
    """One place that metrics go to."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float | None]) -> None: ...

    @abstractmethod
    def truncate_after(self, step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class JsonLines(Sink):
    """One JSON object a line: {"step": 3, "reward/mean": 0.5, ...}."""

    def __init__(self, path: Path) -> None:
        self._path = path
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

    def __init__(self, dir: Path) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._dir = dir
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


class Wandb(Sink):
    """A wandb run; a resumed run goes on in the same one."""

    def __init__(self, dir: Path, config: BaseModel, project: str, experiment: str) -> None:
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise _missing("wandb") from error
        self._dir, self._config, self._project, self._experiment = dir, config, project, experiment
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

            self._dir.mkdir(parents=True, exist_ok=True)
            id_file = self._dir / "wandb_id"
            run_id = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:8]
            id_file.write_text(run_id)
            self._run = wandb.init(
                project=self._project,
                name=self._experiment,
                dir=str(self._dir),
                id=run_id,
                resume="allow",
                config=self._config.model_dump(mode="json"),
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
