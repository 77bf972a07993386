"""Processes that act for this one: the tails of their output, and an end that leaves nothing of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from agentrl.system.cancellation import completed

TAIL = 16 << 10
"""Bytes of a process's output that are kept."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
WATCH = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    group = int(line)
    groups.discard(-group) if group < 0 else groups.add(group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
"""Program that reads process groups, each as a number when it begins and as a negative number when it has ended. When
its stdin ends, it kills the others."""


class _Watch:
    """Process that kills the processes that are left when this one is gone, also by SIGKILL."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def tell(self, group: int) -> None:
        """Send a number to the watching process. Safe from any thread."""
        with self._lock:  # a second one's end would kill the groups that it knows
            if self._process is None:
                command = [sys.executable, "-S", "-c", WATCH]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%d\n" % group)


_WATCH = _Watch()


def signal_name(number: int) -> str:
    """Name a signal; most of the real-time ones have a number alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class Process(ABC):
    """A process that was started, here or elsewhere."""

    tails: Mapping[int, bytearray]
    """Ends of its output: 1, stdout, and 2, stderr."""
    overran = False
    """True where it wrote more than it may, and was killed for that."""

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Status that it ended with, negative for a signal; None while it runs."""

    @abstractmethod
    def give(self, stdin: bytes) -> None:
        """Write its whole input."""

    @abstractmethod
    async def ended(self) -> None:
        """Wait for its end, and kill the processes that it leaves. Cancelled, everything is killed at once."""

    def cpu_seconds(self) -> float:
        """Return the CPU time that it has taken so far, with its children; 0 where nobody knows."""
        return 0.0


SHORTEST_SECRET = 8
"""Characters of a secret. All processes whose environment holds it are killed: a short one is in other ones, too."""


class LocalProcess(Process, asyncio.SubprocessProtocol):
    """Process of this machine in a group of its own."""

    def __init__(self, secret: str, most: int | None = None) -> None:
        """`secret`: text of its environment, which every process that it starts has, too. `most`: bytes of output."""
        if len(secret) < SHORTEST_SECRET:
            raise ValueError(f"secret: expected at least {SHORTEST_SECRET} characters, found {len(secret)}")
        loop = asyncio.get_running_loop()
        self.tails = {1: bytearray(), 2: bytearray()}
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.pid = 0
        self._secret, self._left = secret, most
        self._transport: asyncio.SubprocessTransport | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        secret: str,
        *,
        folder: Path | None = None,
        most: int | None = None,
    ) -> LocalProcess:
        """Start a command in `folder`; None: in this process's. Raises OSError."""
        process = cls(secret, most)
        starting = asyncio.get_running_loop().subprocess_exec(
            lambda: process, *command, env=environment, cwd=folder, start_new_session=True
        )
        transport, _ = await completed(starting, lambda one: one[0].close())
        process._transport, process.pid = transport, transport.get_pid()
        _WATCH.tell(process.pid)
        return process

    @property
    def stdin(self) -> asyncio.WriteTransport:
        assert self._transport is not None
        return cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def give(self, stdin: bytes) -> None:
        self.stdin.write(stdin)
        self.stdin.close()  # When it is written.

    @property
    def status(self) -> int | None:
        return None if self._transport is None else self._transport.get_returncode()

    async def ended(self) -> None:
        try:
            await self.exited
            await asyncio.to_thread(self.kill)  # Else a child may hold the pipes open.
            await self.closed
        except BaseException:
            self.kill()  # Not awaited: a second cancellation must not come between.
            raise
        finally:
            _WATCH.tell(-self.pid)

    def kill(self) -> None:
        """Kill the group, and processes that left it: their environment holds the secret."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for folder in self._knowing():
            with contextlib.suppress(OSError):
                os.kill(int(folder.name), signal.SIGKILL)

    def _knowing(self) -> Iterator[Path]:
        """Find the processes whose environment holds the secret, as folders of /proc."""
        marker = self._secret.encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marker in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    yield folder

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process group has taken so far."""
        return sum(_ticks(file, self.pid) for file in Path("/proc").glob("[0-9]*/stat")) / CLOCK_TICKS

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail = cast(dict[int, bytearray], self.tails)[fd]
        tail += data
        del tail[:-TAIL]
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0 and not self.overran:
                self.overran = True
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class SharedProcess(LocalProcess):
    """Client of a process elsewhere on this machine, whose processes hold the secret, too, and not in its group."""

    def cpu_seconds(self) -> float:
        return sum(_ticks(folder / "stat") for folder in self._knowing()) / CLOCK_TICKS


def _ticks(file: Path, group: int | None = None) -> int:
    """Read the CPU time of a process, and of its children that have ended; 0 where it is of another group."""
    with contextlib.suppress(OSError):
        fields = file.read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) if group is None or int(fields[2]) == group else 0
    return 0
