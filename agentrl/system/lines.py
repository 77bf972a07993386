"""Files of JSON lines that are appended to: metrics, the ledger, alarms, cassettes.

A kill may cut off the last line. Readers leave it out, and it is gone before another line is appended. A last line that
lacks only its end is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from agentrl.errors import UserError
from agentrl.system.json_value import JSON
from agentrl.system.publish import AppendedFile, published

T = TypeVar("T")
_UNREADABLE = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
_NO_STEP = 1 << 62


class AppendedLines(AppendedFile):
    """File of lines, open to be appended to; a line that a kill cut is removed when it is opened."""

    def __init__(self, path: Path) -> None:
        """Open it, or make it and its folder. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        content = path.read_bytes() if self.size and _last_byte(path) != b"\n" else b""
        if content:
            begin = content.rfind(b"\n") + 1
            if _is_json(content[begin:]):
                self.append(b"\n", fsync=False)
            else:
                self._file.truncate(begin)
                self.size = begin

    def add(self, texts: Iterable[str], *, fsync: bool = False) -> None:
        """Append lines, all or nothing, without their ends. Raises TrainingError on a full disk."""
        self.append("".join(f"{text}\n" for text in texts).encode(), fsync=fsync)


def read_lines(path: Path, take: Callable[[JSON], T], broken: Callable[[int, bytes, Exception], UserError]) -> list[T]:
    """Read the lines of a file, in order; a last line that a kill has cut off is left out.

    Args:
        take: makes what is returned of a line's value. Raises AttributeError, KeyError, TypeError or ValueError for
            another form.
        broken: makes the error for a line that cannot be read, of its number, its bytes and the fault.

    Raises OSError, and what `broken` makes.
    """
    found: list[T] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise broken(number, line, error) from error
        try:
            found.append(take(value))
        except _UNREADABLE as error:
            raise broken(number, line, error) from error
    return found


def keep_steps(path: Path, last: int) -> None:
    """Remove the lines of steps after `last`, and each line without a step. Without a file nothing is done.

    The file is replaced as a whole, and only where a line goes. Raises TrainingError on a full disk.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    kept = b"".join(line + b"\n" for line in content.split(b"\n") if _step_of(line) <= last)
    if kept != content:
        with published(path) as temporary:
            temporary.write_bytes(kept)


def _step_of(line: bytes) -> int:
    try:
        step = json.loads(line)["step"]
    except _UNREADABLE:
        return _NO_STEP
    return step if type(step) is int else _NO_STEP


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
