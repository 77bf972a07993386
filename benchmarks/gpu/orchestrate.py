"""Parts of a report, each in a process of its own with a time limit: a hang, a crash or a full memory costs one part.

A part prints rows (see `benchmarks.gpu.part`), which are kept as they come. The report is written anew after each, so
that it is there however the command ends. Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

ROW = "@row "
"""Beginning of a line that is a row: the JSON of [label, values] follows."""
LEAST = 20.0
"""Seconds of the budget under which no further part is begun."""
TAIL = 30
"""Lines of a part's output that the report keeps when it failed."""

Value = str | float | int | bool | None


@dataclass(frozen=True, slots=True)
class Part:
    """A process that prints rows."""

    name: str
    about: str
    words: tuple[str, ...]
    """The command."""
    limit: float
    """Seconds."""


@dataclass(slots=True)
class Result:
    """Result of a part."""

    status: str = "not run"
    """`running`, `done`, `failed: ...`, `timed out after ... s` or `not run: ...`."""
    seconds: float = 0.0
    rows: dict[str, dict[str, Value]] = field(default_factory=dict)
    """Rows by label; a later row of a label replaces the earlier one."""
    tail: list[str] = field(default_factory=list)
    """The end of the output, where it failed."""


@dataclass(slots=True)
class Report:
    """Results of one run of the command, or of several into one folder."""

    device: str
    tiny: bool
    parts: dict[str, Result] = field(default_factory=dict)

    @staticmethod
    def read(file: Path) -> Report:
        """Raises ValueError for a file that is none."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            parts = {name: Result(**part) for name, part in found["parts"].items()}
            return Report(found["device"], found["tiny"], parts)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file} is no report of this command: {error}") from error

    def write(self, folder: Path, markdown: Callable[[Report], str]) -> None:
        """report.json and report.md, each whole or as it was before."""
        files = {"report.json": json.dumps(asdict(self), indent=1) + "\n", "report.md": markdown(self)}
        for name, text in files.items():
            half = folder / f".{name}"
            half.write_text(text, encoding="utf-8")
            half.replace(folder / name)


def run_parts(
    parts: Sequence[Part],
    report: Report,
    folder: Path,
    markdown: Callable[[Report], str],
    *,
    budget: float | None = None,
    again: bool = False,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Run in order what is not done yet, within `budget` seconds in all; rows and endings go into `report` and files.

    Args:
        again: also what is done.
        environment: of the parts, instead of this process's.
    """
    end = None if budget is None else time.monotonic() + budget
    with (folder / "log.txt").open("a", encoding="utf-8", errors="replace") as log:
        for part in parts:
            if report.parts.get(part.name, Result()).status == "done" and not again:
                say(f"{part.name}: done before")
                continue
            left = float("inf") if end is None else end - time.monotonic()
            if left < min(LEAST, part.limit):
                report.parts.setdefault(part.name, Result(status="not run: the budget was used up"))
            else:
                result = report.parts[part.name] = Result(status="running")

                def keep() -> None:
                    report.write(folder, markdown)

                keep()
                say(f"{part.name}: {part.about} (at most {min(part.limit, left):.0f} s)")
                print(f"=== {part.name}", file=log, flush=True)
                try:
                    run_part(part, result, min(part.limit, left), log, keep, environment)
                finally:
                    keep()
                say(f"{part.name}: {result.status}, {result.seconds:.0f} s, {len(result.rows)} rows")
            report.write(folder, markdown)


def run_part(
    part: Part,
    result: Result,
    limit: float,
    log: IO[str],
    keep: Callable[[], None],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run one part to its end or its limit; `keep` is called after each row. Its process group is gone at the end."""
    began, lines = time.monotonic(), list[str]()
    process = subprocess.Popen(
        part.words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=None if environment is None else dict(environment),
        process_group=0,
    )
    assert process.stdout is not None
    reading = threading.Thread(target=_read, args=(process.stdout, lines, result, log, keep), daemon=True)
    reading.start()
    result.status = "interrupted"
    try:
        code = process.wait(limit)
        result.status = "done" if code == 0 else f"failed: {_ending(code)}"
    except subprocess.TimeoutExpired:
        result.status = f"timed out after {limit:.0f} s"
    finally:
        _end_group(process)
        reading.join(10)  # what a process that left the group holds open is not waited for
        result.seconds = round(time.monotonic() - began, 1)
        if result.status != "done":
            result.tail = lines[-TAIL:]


def _read(stream: IO[str], lines: list[str], result: Result, log: IO[str], keep: Callable[[], None]) -> None:
    for line in stream:
        log.write(line)
        log.flush()
        if not line.startswith(ROW):
            lines.append(line.rstrip("\n")[:400])
            del lines[:-TAIL]
            continue
        try:
            label, values = json.loads(line[len(ROW) :])
            result.rows[str(label)] = dict(values)
        except (ValueError, TypeError):
            lines.append(f"not a row: {line[:400]}")
            continue
        keep()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody may be left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
