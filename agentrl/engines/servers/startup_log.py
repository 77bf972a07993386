"""Reading a server's log: the stages of its start-up, and its last error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

Stages = Sequence[tuple[re.Pattern[str], str]]
"""Pattern in a line of the log, and the text for the user, with the groups found filled in."""

LOG_TIME = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ")
TRACEBACK = "Traceback (most recent call last):"
USAGE_ERROR = re.compile(r"^[\w .-]+: error: ")
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")
LONGEST = 8  # lines of one exception's message


class StartupLog:
    """Reads a log as it grows and yields each stage once, though every rank of a server logs it."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._said: set[str] = set()
        self._rest = ""

    def read(self, text: str) -> Iterator[str]:
        """Yield the stages in `text`, the next piece of the log. A carriage return ends a line, too: progress bars."""
        *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
        for line in lines:
            for pattern, saying in self._stages:
                found = pattern.search(line)
                if found and (stage := saying.format(*found.groups())) not in self._said:
                    self._said.add(stage)
                    yield stage


def last_error(log: str, aftermath: str) -> str:
    """Return the last exception's own lines, or the complaint about the command line; else the last lines there are.

    The first process of a server to fail logs the reason; others then report that it is gone, and their exceptions,
    which contain the text `aftermath`, come after it. They are left out where there is another.
    """
    lines = [line.rstrip() for line in re.split(r"[\r\n]", log)]
    usage = [line for line in lines if USAGE_ERROR.match(line)]
    if usage:
        return usage[-1]
    errors = list(exceptions(lines))
    reasons = [error for error in errors if aftermath not in error]
    if errors:
        return (reasons or errors)[-1]
    return "\n".join([line for line in lines if line][-5:]) or "nothing in its log"


def exceptions(lines: list[str]) -> Iterator[str]:
    """Yield the message of each traceback, without the stack."""
    starts = [number for number, line in enumerate(lines) if line.endswith(TRACEBACK)]
    for start in starts:
        for number in range(start + 1, len(lines)):
            line = lines[number]
            if line.endswith(TRACEBACK) or LOG_TIME.match(line):
                break
            if EXCEPTION.match(line):
                rest = lines[number : number + LONGEST]
                ends = (at for at, one in enumerate(rest) if not one or LOG_TIME.match(one) or one.endswith(TRACEBACK))
                yield "\n".join(rest[: next(ends, None)])
                break
