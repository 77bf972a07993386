"""Loggers of a run's metrics, and the loggers that write files: metrics.jsonl, tensorboard. Others are in
`remote_sinks`.

Invariant of metrics.jsonl: every line but the last is a whole JSON object whose first key is `step`. A line
is on the disk once `Tracker.log` has returned from it.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, ParamSpec, cast

from agentrl.config import config_to_dict
from agentrl.config.registries import LOGGERS
from agentrl.config.section import Section
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import ConfigError, DataError, UserError, install_extra
from agentrl.observe.display import Display
from agentrl.observe.generations import Generation
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.lines import AppendedLines, keep_steps, read_lines
from agentrl.system.publish import published
from agentrl.system.registry import configured
from agentrl.system.user_code import user_code

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

P = ParamSpec("P")
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run whose metrics are recorded."""

    dir: Path
    """Its folder, which may not exist yet."""
    config: Mapping[str, JSON]
    """The whole config, as plain values; for a remote logger without secrets."""
    project: str
    experiment: str


class Sink(ABC):
    """A logger: one place that metrics go to. Choose one of your own by `trainer.logger`.

    It is made before the run has passed all of its checks: nothing is written before `write` or `truncate_after`.
    """

    is_remote: ClassVar[bool] = False
    """True: it sends metrics elsewhere, and a run continues where that fails."""

    def __init__(self, run: RunInfo) -> None:
        """Raises e.g. ConfigError for a package that is not installed.

        A parameter `options`, annotated with a pydantic model, is given the value in `trainer.logger_options` for it.
        """
        self.run = run

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record the metrics of a step; None stands for a number that is not finite."""

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:  # noqa: B027 - optional
        """Record some generations of a validation, one at least, before the metrics of their step."""

    @abstractmethod
    def truncate_after(self, step: int) -> None:
        """Forget the steps after `step`, which a resumed run does again; -1: all.

        Called before any `write`, and again where a run goes back after a worker's death.
        """

    @abstractmethod
    def close(self) -> None:
        """End the logger's run; the training run is over."""


_SECRET = re.compile(
    r"(api_?key|(access|private|secret)_?key|token|secret|passw(or)?d|credentials?|authorization)", re.IGNORECASE
)
"""End of the name of a value that is a secret: of an environment variable, a header, an option of the user's."""
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@]+(?=@)")


def without_secrets(value: JSON) -> JSON:
    """Replace texts whose name says that they are secrets, and credentials in addresses, by `[secret]`."""
    if isinstance(value, dict):
        return {
            name: "[secret]" if isinstance(item, str) and _names_secret(name) else without_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return _IN_ADDRESS.sub("[secret]", value) if isinstance(value, str) else value


def _names_secret(name: str) -> bool:
    return any(found.end() == len(name) for found in _SECRET.finditer(name))


class Tracker:
    """Sends each step's metrics to every logger named."""

    def __init__(
        self, names: Sequence[str], options: Mapping[str, Mapping[str, object]], run: RunInfo, display: Display
    ) -> None:
        """Make the loggers (`trainer.logger`, `trainer.logger_options`); they write nothing yet. Raises ConfigError."""
        self._display = display
        self._warned: set[str] = set()
        self._sinks: dict[str, Sink] = {}
        public = as_mapping(without_secrets(dict(run.config)))
        try:
            for name in names:
                key = f"trainer.logger_options.{name}"
                found = cast(type[Sink], LOGGERS.get(name))
                make = configured(found, options.get(name, {}), key)
                with user_code(f"logger {name}", found):
                    self._sinks[name] = make(replace(run, config=public) if found.is_remote else run)
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                self.close()
            raise

    @staticmethod
    def from_config(trainer: RunConfig, dir: Path, config: Section, display: Display) -> Tracker:
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
            self._send(name, sink.write, step, clean)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Record some generations of the validation at a step; all of them are written."""
        for name, sink in self._sinks.items() if generations else ():
            self._send(name, sink.write_generations, step, generations)

    def truncate_after(self, step: int) -> None:
        """Forget the steps after `step`: a resumed run does them again."""
        for name, sink in self._sinks.items():
            with user_code(f"logger {name}", sink.truncate_after):
                sink.truncate_after(step)

    def close(self) -> None:
        """Close the loggers in reverse order, each of them also where another one fails to."""
        with ExitStack() as stack:
            for name, sink in self._sinks.items():
                stack.callback(self._send, name, sink.close)

    def _send(self, name: str, method: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a logger's method. Values that a remote logger fails to send are lost and reported once: a run does not
        end for them."""
        if not self._sinks[name].is_remote:
            with user_code(f"logger {name}", method):
                return method(*args, **kwargs)
        try:
            method(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            if f"logger {name}" not in self._warned:
                self._warned.add(f"logger {name}")
                self._display.warn(
                    f"logger {name}: {one_line(error)}; it lacks what it was sent here, and the run goes on. Further "
                    "failures of it are not told"
                )
        return None


class Console(Sink):
    """Each step on the terminal. The training loop calls the display itself for each step, so this does nothing."""

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
        self._file: AppendedLines | None = None
        """Open from the first write on."""

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if self._file is None:
            self._file = AppendedLines(self._path)
        self._file.add([json.dumps({"step": step, **metrics}, allow_nan=False)], fsync=True)

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        text = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in generations)
        with published(self._path.parent / "val_generations" / f"{step:06d}.jsonl") as temporary:
            temporary.write_text(text, encoding="utf-8")

    def truncate_after(self, step: int) -> None:
        self.close()  # of what was there before
        if self._path.exists():
            read_metrics(self._path)  # a line that cannot be read is not lost without a word
            keep_steps(self._path, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Tensorboard(Sink):
    """Event files under `tensorboard/`."""

    def __init__(self, run: RunInfo) -> None:
        need_package("tensorboard", "torch.utils.tensorboard")
        self._dir = run.dir / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        writer = self._begin()
        for name, value in metrics.items():
            writer.add_scalar(name, math.nan if value is None else value, step)
        writer.flush()

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        for number, one in enumerate(generations):
            # Four blanks: the page reads Markdown, and would obey the policy's text.
            text = "".join(f"    {line}\n" for line in one.as_text().splitlines())
            self._begin().add_text(f"val/generations/{number}", text, step)

    def _begin(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._dir, purge_step=self._purge_step)
        return self._writer

    def truncate_after(self, step: int) -> None:
        self.close()  # a writer purges only as it begins
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_metrics(path: Path) -> list[dict[str, JSON]]:
    """The lines of a metrics.jsonl, in order. A last line cut off by a kill is left out.

    Raises DataError with the line's number for any other line that is not an object with a `step`.
    """

    def take(value: JSON) -> dict[str, JSON]:
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise TypeError("no such object")
        return value

    def broken(number: int, line: bytes, error: Exception) -> DataError:
        want = "want an object with an integer `step`"
        return DataError(f"{path}, line {number}: {want}, found {line[:80]!r} ({error}); delete the line to go on")

    return read_lines(path, take, broken)


def one_line(error: Exception) -> str:
    """Write an error of foreign code, its class and text, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{' ...' if len(text) > 400 else ''}"


def need_package(extra: str, module: str) -> None:
    """Import a logger's package. Raises ConfigError that names the extra of ours that installs it."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger names {extra}, which is not installed: {install_extra(extra)}, or leave it out"
        ) from error
