"""The memory that a run holds where no control group counts it: its processes' own, and what the kernel holds for them.

No limit of a process bounds the second. With 64 processes of 256 descriptors each, sockets of the system's default
size may hold 64 * 256 * 0.2 MB = 3.4 GB, or 64 GB when they are made as large as a program may make them; and to read
one byte in every 2 MB of an empty mapping costs a page table of 4 KB each time. So the supervisor counts what there
is, each thing as large as it can become. For that, the filter (`sandbox.seccomp`) lets no socket and no pipe become
larger than the default, and nothing get out of sight: descriptors on their way through a socket, a table of
descriptors of a thread's own. Calls whose memory /proc does not show are denied: System V IPC, message queues, memfd,
inotify, aio, Landlock's rulesets, keys, io_uring. What is left is small or takes long: an open file or eventfd (1 KB,
16 MB in all), a process (30 KB, 2 MB in all), a lock on a part of a file (0.2 KB, after a walk past all others).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def _setting(path: str, otherwise: int) -> int:
    try:
        return int(Path("/proc/sys/net/core", path).read_text())
    except (OSError, ValueError):
        return otherwise


SOCKET = _setting("wmem_default", 212_992) + _setting("rmem_default", 212_992) + _setting("optmem_max", 131_072)
"""Bytes that wait to be received from a socket and for it, and those of its options. What a socket pair's closed end
has sent waits at the other one.
"""
TCP = "4096 65536 65536"
"""Smallest, first and largest buffer of a run's TCP sockets, as tcp_rmem and tcp_wmem have it: both are less than
SOCKET, where they may grow to 6 MB and more by themselves.
"""
PIPE = 64 << 10
_WATCH = 256
"""Bytes for each descriptor that an epoll instance watches."""
MOST_WATCHES = 1 << 16
"""Watched descriptors of a run; four times as many as it may have descriptors. Counting more would take the supervisor
too long.
"""
_MAPPING = 256
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class _Process:
    """Bytes, from /proc/PID/status, which everyone may read."""

    pid: int
    resident: int
    tables: int
    size: int

    @property
    def most(self) -> int:
        """More than it holds in its own pages, their tables and its mappings."""
        return self.resident + self.tables + self.size // _PAGE * _MAPPING

    def exactly(self) -> int:
        """The same, shared pages divided among those who share them. It takes milliseconds."""
        try:
            pages = _sum(Path(f"/proc/{self.pid}/smaps_rollup").read_bytes(), b"Pss:", b"SwapPss:")
            mappings = Path(f"/proc/{self.pid}/maps").read_bytes().count(b"\n")
        except PermissionError:  # it has seen to that
            return self.most
        except OSError:
            return 0
        return pages + self.tables + mappings * _MAPPING


def held(pids: Iterable[int], files: int, most: int, open_files: int, *, own_network: bool) -> int:
    """Bytes that the processes `pids` hold: an upper bound of that within `most`, beyond it a lower one.

    `files`: bytes of files in memory. `open_files`: descriptors that a process may have. `own_network`: they are alone
    in the caller's network namespace, whose sockets are counted as a whole, those among them that nobody has accepted.
    """
    processes = [process for pid in pids if (process := _process(pid))]
    total = files + _descriptors(processes, open_files, most, sockets=not own_network)
    if own_network:
        total += _sockets_in_use() * SOCKET
    certain = total + sum(process.tables for process in processes)
    bound = total + sum(process.most for process in processes)
    if bound <= most:
        return bound
    return certain if certain > most else total + sum(process.exactly() for process in processes)


def limit_tcp() -> None:
    """Limit TCP buffers in the network namespace of the caller, which has to own it."""
    for name in ("tcp_rmem", "tcp_wmem"):
        Path("/proc/sys/net/ipv4", name).write_text(TCP)


def _process(pid: int) -> _Process | None:
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return None
    sizes = [_sum(status, *names) for names in ((b"VmRSS:", b"VmSwap:"), (b"VmPTE:",), (b"VmSize:",))]
    return _Process(pid, *sizes)


def _sum(text: bytes, *names: bytes) -> int:
    """Sum of lines such as `VmRSS:  12 kB`, in bytes."""
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(names)) << 10


def _descriptors(processes: list[_Process], open_files: int, most: int, *, sockets: bool) -> int:
    """Bytes in pipes and sockets, each counted once, and of what epoll instances watch."""
    seen: set[str] = set()
    total = watches = 0
    for process in processes:
        place = f"/proc/{process.pid}/fd"
        try:
            names = os.listdir(place)
        except PermissionError:  # nobody may look into it: it may have as many as it can
            total += open_files * (SOCKET if sockets else PIPE)
            continue
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError):
                what = os.readlink(f"{place}/{name}")
                if what == "anon_inode:[eventpoll]":
                    watches += Path(f"{place}info/{name}").read_bytes().count(b"tfd:")
                elif what.startswith(("pipe:", "socket:")) and what not in seen:
                    seen.add(what)
                    total += PIPE if what.startswith("pipe:") else SOCKET if sockets else 0
            if watches > MOST_WATCHES or total > most:
                return most + 1
    return total + watches * _WATCH


def _sockets_in_use() -> int:
    """Number of sockets in the caller's network namespace, closed ones with unread data included."""
    with open("/proc/net/sockstat", "rb") as lines:
        return int(lines.readline().split()[2])
