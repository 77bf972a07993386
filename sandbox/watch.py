"""Usage of a run's processes, read from /proc while they run, for the limits that the kernel does not hold by itself
in every tier.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_DEEPEST = 1024
"""Characters of a path."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of all living processes of a run, together."""

    threads: int
    cpu_seconds: float
    """CPU-seconds of the processes, and of those of their children that they waited for."""
    pids: list[int]


def usage(group: int | None) -> Usage:
    """Read the usage of process group `group`; if None, of every process but pid 1 that /proc shows."""
    threads, ticks, pids = 0, 0, []
    for pid in _pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if (pid == 1) if group is None else (int(fields[2]) != group):
            continue
        pids.append(pid)
        ticks += sum(int(field) for field in fields[11:15])
        threads += int(fields[17])
    return Usage(threads, ticks / _TICKS, pids)


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def folder_usage(path: str, most: int) -> tuple[int, int]:
    """Bytes on disk and number of files beneath `path`.

    Counting stops at `most` files, and where folders lie too deep to be looked into counts as more than that.
    """
    size, count, waiting = 0, 0, [path]
    while waiting and count <= most:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > most:
                        break
                    state = entry.stat(follow_symlinks=False)
                    size += state.st_blocks * 512
                    if len(entry.path) > _DEEPEST:
                        return size, most + 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue
    return size, count
