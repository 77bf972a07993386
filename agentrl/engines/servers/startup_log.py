"""What a server's log says: how far its start-up is, and what its last error was."""

from __future__ import annotations

import re
from collections.abc import Iterator

STAGES = (
    (re.compile(r"server_args="), "configured"),
    (re.compile(r"Load weight begin"), "loading weights"),
    (re.compile(r"[Ll]oading.*shards: +(\d+)% Completed"), "loading weights: {}%"),
    (re.compile(r"Load weight end\. elapsed=([\d.]+) s"), "weights loaded in {} s"),
    (re.compile(r"KV Cache is allocated\..*#tokens: (\d+)"), "KV cache of {} tokens"),
    (re.compile(r"Capture (?:\w+ )*(?:CUDA|cuda) graph.* begin"), "capturing CUDA graphs"),
    (re.compile(r"fired up and ready"), "ready"),
)
"""What is looked for in a line, and what is said to the user."""

LOG_TIME = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ")
TRACEBACK = "Traceback (most recent call last):"
USAGE_ERROR = re.compile(r"^[\w .-]+: error: ")
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")
LONGEST = 8  # lines of one exception's message


class StartupLog:
    """Reads the log as it grows and says each stage once, though every rank of a server logs it."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._rest = ""

    def read(self, text: str) -> Iterator[str]:
        """The stages in `text`, the log's next piece. A progress bar overwrites its line after a carriage return."""
        *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
        for line in lines:
            for pattern, saying in STAGES:
                found = pattern.search(line)
                if found and (stage := saying.format(*found.groups())) not in self._said:
                    self._said.add(stage)
                    yield stage


def last_error(log: str) -> str:
    """The last exception's own lines, or the complaint about the command line; else the last lines there are.

    Of the processes of one server the first to fail has the reason and logs it; others then report that it is gone,
    and their exceptions come after it under "Rank ... died". Those are left out where there is another.
    """
    lines = [line.rstrip() for line in re.split(r"[\r\n]", log)]
    usage = [line for line in lines if USAGE_ERROR.match(line)]
    if usage:
        return usage[-1]
    errors = list(exceptions(lines))
    reasons = [error for error in errors if "scheduler died during initialization" not in error]
    if errors:
        return (reasons or errors)[-1]
    return "\n".join([line for line in lines if line][-5:]) or "nothing in its log"


def exceptions(lines: list[str]) -> Iterator[str]:
    """The message, without the stack, of each traceback."""
    starts = [number for number, line in enumerate(lines) if line.endswith(TRACEBACK)]
    for start in starts:
        for number in range(start + 1, len(lines)):
            line = lines[number]
            if line.endswith(TRACEBACK) or LOG_TIME.match(line):
                break
            if EXCEPTION.match(line):
                yield "\n".join(message(lines[number : number + LONGEST]))
                break


def message(lines: list[str]) -> Iterator[str]:
    """An exception's lines, up to the next thing logged."""
    for line in lines:
        if not line or LOG_TIME.match(line) or line.endswith(TRACEBACK):
            return
        yield line
