"""A control group for each run: memory and number of processes, of all its processes together, held by the kernel.

Version 1 (memory and pids hierarchies) and version 2. The server makes them below its own group and must be able to
write there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.claim import PREFIX, claim
from sandbox.limits import Limit, Limits

IP_SOCKETS = 16 << 20
"""Bytes that TCP and UDP sockets of a run hold together, which version 1 counts by themselves, beyond its memory."""
_CHARGED_AT_ONCE = 1 << 20
"""Bytes that may be missing to a limit when a process is killed for it."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Folders in which the server may make groups: one a controller in version 1, one in version 2."""

    version: int
    memory: Path
    pids: Path
    claims: list[int]
    """Open descriptors that say whose the folders are."""

    @property
    def folders(self) -> list[Path]:
        return list(dict.fromkeys((self.memory, self.pids)))

    def limit_memory(self, memory_bytes: int) -> None:
        """Limit the memory of all groups together."""
        _limit_memory(self.memory, self.version, memory_bytes)

    def remove(self) -> None:
        """Remove the folders with their groups. A group that still holds a process stays."""
        for folder in self.folders:
            _remove(folder)
        while self.claims:
            os.close(self.claims.pop())


@dataclass(slots=True)
class Group:
    """One run's group. A process with one thread that writes "0" to each of `fds` joins."""

    hierarchy: Hierarchy
    memory: Path
    pids: Path
    fds: list[int] = field(default_factory=list)

    @property
    def folders(self) -> list[Path]:
        return list(dict.fromkeys((self.memory, self.pids)))

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def reached(self) -> list[Limit]:
        """Return those of its limits that the kernel had to enforce."""
        found = []
        if self._killed() and self._at_its_limit():
            found.append(Limit.MEMORY)
        if _value(self.pids / "pids.events", "max"):
            found.append(Limit.PROCESSES)
        return found

    def is_victim(self) -> bool:
        """Check whether a process was killed because all groups together were at their limit, and this one was not at
        its own.
        """
        return self._killed() and not self._at_its_limit()

    def _killed(self) -> bool:
        name = "memory.oom_control" if self.hierarchy.version == 1 else "memory.events"
        return _value(self.memory / name, "oom_kill") > 0

    def _at_its_limit(self) -> bool:
        if self.hierarchy.version == 2:
            return _value(self.memory / "memory.events", "max") > 0
        largest = int((self.memory / "memory.max_usage_in_bytes").read_text())
        return largest >= int((self.memory / "memory.limit_in_bytes").read_text()) - _CHARGED_AT_ONCE

    def limit_memory(self, memory_bytes: int) -> None:
        """Raises OSError where more is in use and cannot be reclaimed."""
        _limit_memory(self.memory, self.hierarchy.version, memory_bytes)

    def memory_now(self) -> int:
        """Bytes in use."""
        name = "memory.usage_in_bytes" if self.hierarchy.version == 1 else "memory.current"
        return int((self.memory / name).read_text())

    async def remove(self) -> None:
        """Once its processes are gone; a killed process takes a moment to leave. Raises OSError when they are still
        there after 5 s.
        """
        self.close_fds()
        for folder in self.folders:
            for attempt in itertools.count():
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if attempt == 100:
                        raise
                    await asyncio.sleep(0.001 if attempt < 20 else 0.06)


def _value(file: Path, key: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)


def _limit_memory(folder: Path, version: int, memory_bytes: int) -> None:
    if version == 2:
        (folder / "memory.max").write_text(str(memory_bytes))
        with contextlib.suppress(OSError):  # exists where the kernel counts swap
            (folder / "memory.swap.max").write_text("0")
        return
    alone, with_swap = folder / "memory.limit_in_bytes", folder / "memory.memsw.limit_in_bytes"
    files = [alone, with_swap] if with_swap.exists() else [alone]
    if memory_bytes > int(alone.read_text()):  # the first may never be above the second
        files.reverse()
    for file in files:
        file.write_text(str(memory_bytes))


def find(name: str) -> Hierarchy:
    """A folder `name` for this server's groups, newly made; those of servers that were killed go. Raises OSError,
    saying what is missing.
    """
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _, place, kind, *_ in mounts:
        if kind == "cgroup2" and _has_v2(Path(place + own.get("", "/"))):
            return _make_v2(Path(place + own[""]), name)
    folders = {}
    for _, place, kind, options, *_ in mounts:
        for controller in ("memory", "pids"):
            if kind == "cgroup" and controller in options.split(","):
                path = next((p for names, p in own.items() if controller in names.split(",")), "/")
                below = Path(place + path)
                folders[controller] = (below if below.is_dir() else Path(place)) / name
    if len(folders) < 2:
        raise OSError("no cgroup hierarchy with the controllers memory and pids is mounted")
    return Hierarchy(1, folders["memory"], folders["pids"], [_make(folder) for folder in set(folders.values())])


def _make(folder: Path) -> int:
    """Make a folder beside those of other servers, and claim it. Folders of dead servers are removed."""
    for other in folder.parent.glob(f"{PREFIX}*"):
        if (fd := claim(other)) is not None:
            _remove(other)
            os.close(fd)
    while True:
        folder.mkdir(exist_ok=True)
        if (fd := claim(folder)) is not None:
            return fd


def _remove(folder: Path) -> None:
    for child in folder.iterdir() if folder.is_dir() else ():
        if child.is_dir():
            with contextlib.suppress(OSError):
                child.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _has_v2(folder: Path) -> bool:
    try:
        return {"memory", "pids"} <= set((folder / "cgroup.controllers").read_text().split())
    except OSError:
        return False


def _make_v2(own: Path, name: str) -> Hierarchy:
    """Make the folder in version 2, where a group with processes hands no controllers down: the server moves itself
    into a leaf first, where it is alone in its group.
    """
    control = own / "cgroup.subtree_control"
    if not {"memory", "pids"} <= set(control.read_text().split()):
        if (own / "cgroup.procs").read_text().split() != [str(os.getpid())]:
            raise OSError(f"{own} holds other processes: start the server in a delegated cgroup of its own")
        leaf = own / f"{name}-server"
        leaf.mkdir()
        (leaf / "cgroup.procs").write_text("0")
        control.write_text("+memory +pids")
    folder = own / name
    claims = [_make(folder)]
    (folder / "cgroup.subtree_control").write_text("+memory +pids")
    return Hierarchy(2, folder, folder, claims)


_numbers = itertools.count()


def make(hierarchy: Hierarchy, limits: Limits) -> Group:
    """A group that holds `limits`. Two processes more than the limit: the supervisor is in it."""
    name = f"run{next(_numbers)}"
    group = Group(hierarchy, hierarchy.memory / name, hierarchy.pids / name)
    try:
        for folder in group.folders:
            folder.mkdir()
        group.limit_memory(limits.memory_bytes)
        if hierarchy.version == 1:
            with contextlib.suppress(FileNotFoundError):  # a kernel may come without it, and then counts none
                (group.memory / "memory.kmem.tcp.limit_in_bytes").write_text(str(IP_SOCKETS))
        (group.pids / "pids.max").write_text(str(limits.processes + 1))
        # A thread that moves itself by `tasks` waits for nobody. A process that moves has the kernel wait until nobody
        # forks or exits anywhere: 5 to 15 ms on a busy machine.
        door = "tasks" if hierarchy.version == 1 else "cgroup.procs"
        group.fds += [os.open(folder / door, os.O_WRONLY | os.O_CLOEXEC) for folder in group.folders]
    except OSError:
        group.close_fds()
        for folder in group.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return group
