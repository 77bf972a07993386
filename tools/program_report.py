"""Outcome of a program as text for the model: its output, what it failed with, the limits that it reached."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence

import pydantic

_FRAME = re.compile(r'\s*File "([^"]*)", line \d+')
_INSTALLED = ("site-packages/", "dist-packages/", "/lib/python3", "/lib64/python3", "<frozen ")
"""Parts of paths of libraries, which the program's own files do not have."""
_FIRST_FRAMES, _LAST_FRAMES = 3, 8
"""Numbers of the program's own frames that are kept of each traceback."""
_MOST_STDERR = 100_000
"""Characters at the end of stderr that are looked at."""

_SENTENCES = {
    "cpu_time": "The program was stopped: it used too much CPU time.",
    "memory": "The program ran out of memory{memory}.",
    "processes": "The program reached the limit of processes and threads.",
    "open_files": "The program reached the limit of open files.",
    "file_size": "The program reached the limit of a file's size.",
    "disk": "The disk is full.",
    "inodes": "The limit of the number of files is reached.",
    "output": "The program was stopped: it wrote too much output.",
}


class Command(pydantic.BaseModel):
    """End of a command, in SandboxFusion's fields, and in further ones of agentrl's server."""

    status: str
    return_code: int | None = None
    """Exit status; minus the number of the signal that ended it."""
    stdout: str | None = None
    stderr: str | None = None
    limits: list[str] = []
    cut: list[str] = []

    @property
    def timed_out(self) -> bool:
        """True when the program was stopped for its running time."""
        return self.status == "TimeLimitExceeded" or "wall_time" in self.limits


def report(command: Command, seconds: float, memory_mb: int | None, ends: str = "") -> str:
    """Write output, then errors, then in words what the program was stopped for; all of it may be empty.

    `seconds`, `memory_mb`: limits that it was given; `ends`: what to add about its end.
    """
    parts = [(command.stdout or "").rstrip("\n"), _cut("stdout", command)]
    parts += [shortened(command.stderr or ""), _cut("stderr", command)]
    parts += [*_reasons(command, seconds, memory_mb), ends]
    return "\n".join(part for part in parts if part)


def _cut(stream: str, command: Command) -> str:
    return f"[the rest of {stream} was too long and is lost]" if stream in command.cut else ""


def _reasons(command: Command, seconds: float, memory_mb: int | None) -> Iterator[str]:
    if command.timed_out:
        yield f"The program was stopped after {seconds:g} s."
    memory = f" ({memory_mb} MB)" if memory_mb else ""
    for limit in command.limits:
        if limit != "wall_time":
            yield _SENTENCES.get(limit, f"The program reached the limit {limit}.").replace("{memory}", memory)
    code = command.return_code
    if command.timed_out or command.limits or not code:
        return
    if code < 0:
        yield f"The program was ended by the signal {_signal_name(-code)}."
    elif code > 1 or not command.stderr:
        yield f"The program ended with exit status {code}."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def shortened(stderr: str) -> str:
    """Shorten tracebacks to the program's own frames: those of libraries are counted. Other lines stay as they are."""
    lines = stderr[-_MOST_STDERR:].rstrip("\n").split("\n")
    if len(stderr) > _MOST_STDERR:
        lines[0] = f"[{len(stderr) - _MOST_STDERR} characters cut]"
    return "\n".join(_without_libraries(lines))


def _without_libraries(lines: Sequence[str]) -> Iterator[str]:
    frames: list[list[str]] = []
    for line in lines:
        if _FRAME.match(line):
            frames.append([line])
        elif frames and line.startswith("    " if frames[0][0].startswith("  ") else "  "):
            frames[-1].append(line)
        else:
            yield from _shown(frames)
            frames = []
            yield line
    yield from _shown(frames)


def _shown(frames: list[list[str]]) -> Iterator[str]:
    """Iterate over the lines that are shown of one traceback's frames."""
    is_own = [not any(mark in _path(frame) for mark in _INSTALLED) for frame in frames]
    own = [place for place, mine in enumerate(is_own) if mine]
    kept = {*own[:_FIRST_FRAMES], *own[-_LAST_FRAMES:]}
    left_out = 0
    for place, frame in enumerate(frames):
        if place in kept or not own:
            yield from _counted(left_out)
            left_out = 0
            yield frame[0].replace(_path(frame), _path(frame).rpartition("/")[2], 1)
            yield from frame[1:]
        else:
            left_out += 1
    yield from _counted(left_out)


def _counted(left_out: int) -> Iterable[str]:
    return [f"  [{left_out} frame{'s' * (left_out > 1)} left out]"] if left_out else []


def _path(frame: Sequence[str]) -> str:
    match = _FRAME.match(frame[0])
    return match[1] if match else ""
