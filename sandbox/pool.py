"""The server's side of a run: order it from a zygote, drain what it writes, name the limits that it reached, leave
nothing behind.

Every run ends in exactly one `Outcome`, or in `SandboxFault` where the sandbox itself failed; also when the caller is
cancelled, in which case the run is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox import cgroup, claim, root, wire
from sandbox.drain import Drain
from sandbox.launch import ENVIRONMENT, SandboxFault, ZygoteProcess
from sandbox.limits import Limit, Limits
from sandbox.supervise import FileRefused
from sandbox.tiers import Tier

GRACE = 10.0
"""Seconds past its own deadline after which a run's supervisor is taken for lost, and its zygote killed."""
PRELOADED = {"": (), "numpy": ("numpy", "numpy.random"), "sympy": ("numpy", "numpy.random", "sympy")}
"""Warm interpreters, by the name that a job asks for. Each is no larger than it must be: forking costs by the page."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process of a run. `argv` None: `script` (a file of the run) in the warm interpreter."""

    argv: list[str] | None
    seconds: float
    script: str = "main.py"
    arguments: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    show_last: bool = False
    """`script` prints its last expression."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run's order: commands one after another, up to the first that fails, in a folder that holds `files`."""

    commands: Sequence[Command]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    """Standard input of the last command."""
    fetch: Sequence[str] = ()
    warm: str = ""
    """Kind of warm interpreter: a key of `PRELOADED`."""


@dataclass(slots=True)
class CommandOutcome:
    stdout: bytes
    stderr: bytes
    cut: list[str]
    """Names of the streams, stdout or stderr, that were longer than is kept."""
    code: int | None
    """Exit status; None if a signal ended it."""
    signal: int | None
    seconds: float
    limits: list[Limit]
    error: str | None = None
    """Reason why the command could not be started."""


@dataclass(frozen=True, slots=True)
class Outcome:
    commands: list[CommandOutcome]
    files: dict[str, bytes]
    refused: dict[str, str]
    """Files asked for that could not be fetched, and why."""
    cpu_seconds: float


class Slots:
    """The lowest free numbers: each run's user, where each has its own."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def give(self, slot: int) -> None:
        self._free.append(slot)


class Pool:
    """Zygotes of one tier, one for each warm interpreter, and the runs in them."""

    def __init__(self, tier: Tier, expose: Sequence[str] = ()) -> None:
        self.tier = tier
        self.running = 0
        self.groups: cgroup.Hierarchy | None = None
        self._claim: int | None
        self._base, self._claim = claim.temporary_folder()
        self._base.chmod(0o711)
        readable = root.readable(expose)
        self.zygotes = {
            name: ZygoteProcess(tier, modules, readable, str(self._base)) for name, modules in PRELOADED.items()
        }
        self._slots = Slots()
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises SandboxFault where this machine cannot hold the tier."""
        is_root = os.geteuid() == 0
        if self.tier in (Tier.LANDLOCK, Tier.LANDLOCK_UID) and is_root is (self.tier is Tier.LANDLOCK):
            await self.stop()
            raise SandboxFault(
                "root gives each run a user of its own" if is_root else "only root can give each run a user of its own"
            )
        try:
            if self.tier is Tier.CGROUP:
                self.groups = cgroup.find(self._base.name)
                await cgroup.make(self.groups, Limits()).remove()
        except OSError as error:
            await self.stop()
            raise SandboxFault(f"no control groups: {error}") from error
        try:
            await asyncio.gather(*(zygote.start() for zygote in self.zygotes.values()))
        except SandboxFault:
            await self.stop()
            raise

    async def stop(self) -> None:
        await asyncio.gather(*(zygote.stop() for zygote in self.zygotes.values()))
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self.groups:
            self.groups.remove()
        if self._claim is not None:
            await asyncio.to_thread(claim.remove, self._base)
            os.close(self._claim)
            self._claim = None

    @property
    def loaded(self) -> list[str]:
        """Modules that interpreters have loaded."""
        return sorted({module for zygote in self.zygotes.values() for module in zygote.loaded})

    async def run(self, job: Job, limits: Limits) -> Outcome:
        """Run a job to its end. Raises SandboxFault; on cancellation the run is killed before this returns."""
        run = await Run.begin(self, job, limits)
        try:
            return await run.finish()
        finally:
            await run.close()

    def leave(self, group: cgroup.Group) -> None:
        """Remove a group in the background."""
        task = asyncio.create_task(group.remove())
        self._leaving.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and (error := task.exception()):
            print(f"sandbox: a control group could not be removed: {error}", file=sys.stderr)


class Run:
    """A run under way."""

    def __init__(self, pool: Pool, job: Job, limits: Limits) -> None:
        self.pool, self.job, self.limits = pool, job, limits
        self.flood = asyncio.Event()
        self.drains: list[Drain] = []
        self.group: cgroup.Group | None = None
        self.control: socket.socket | None = None
        self.channel: socket.socket | None = None
        self.closed = False
        self._slot = pool._slots.take()
        self._zygote = pool.zygotes[job.warm]
        pool.running += 1

    @classmethod
    async def begin(cls, pool: Pool, job: Job, limits: Limits, *, session: bool = False) -> Run:
        """Start it. Raises SandboxFault."""
        run = cls(pool, job, limits)
        try:
            await run._order(session)
        except BaseException as error:
            await run.close()
            if isinstance(error, OSError):
                raise SandboxFault(f"a run could not be started: {error}") from error
            raise
        return run

    async def _order(self, session: bool) -> None:
        theirs: list[int] = []
        try:
            if self.pool.groups:
                self.group = cgroup.make(self.pool.groups, self.limits)
                theirs += [os.dup(fd) for fd in self.group.fds]
                self.group.close_fds()
            groups = len(theirs)
            for _ in range(2 * len(self.job.commands)):
                read, write = os.pipe()
                theirs.append(write)
                self.drains.append(Drain(read, self.limits.output_bytes, self.limits.flood_bytes, self.flood))
            if session:
                self.channel, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.channel.setblocking(False)
                theirs.append(channel.detach())
            self.control, control = socket.socketpair()
            self.control.setblocking(False)
            theirs.insert(0, control.detach())
            await self._zygote.fork(theirs, groups, self._slot)
        finally:
            for fd in theirs:
                os.close(fd)
        header = {
            "limits": self.limits.to_json(),
            "commands": [
                {
                    "argv": command.argv,
                    "script": command.script,
                    "arguments": command.arguments,
                    "seconds": command.seconds,
                    "environment": {**ENVIRONMENT, **command.environment},
                    "show_last": command.show_last,
                }
                for command in self.job.commands
            ],
            "files": list(self.job.files),
            "stdin": bool(self.job.stdin),
            "fetch": list(self.job.fetch),
            "session": session,
        }
        blobs = [*self.job.files.values(), *([self.job.stdin] if self.job.stdin else [])]
        message = wire.pack(header, blobs)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the supervisor ended: `finish` says so
            await asyncio.get_running_loop().sock_sendall(self.control, message)

    async def finish(self) -> Outcome:
        """Wait for the end. Raises SandboxFault."""
        assert self.control is not None
        seconds = sum(command.seconds for command in self.job.commands) + GRACE
        answer = asyncio.create_task(wire.receive_async(self.control))
        flood = asyncio.create_task(self.flood.wait())
        started = time.monotonic()
        try:
            await asyncio.wait({answer, flood}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self.flood.is_set():
                return self._flooded(time.monotonic() - started)
            if not answer.done():
                await self._zygote.stop()  # kills every run of this zygote: the last resort
                raise SandboxFault("the supervisor did not answer in time")
            header, blobs = answer.result()
        except (EOFError, ConnectionResetError) as error:
            # Kernel and administrator apart, only the memory limit can end the supervisor.
            self._raise_if_victim()
            if self.group and Limit.MEMORY in self.group.reached():
                return self._killed(time.monotonic() - started, Limit.MEMORY)
            raise SandboxFault("the supervisor ended without an answer") from error
        finally:
            for task in (answer, flood):
                task.cancel()
            await asyncio.gather(answer, flood, return_exceptions=True)
        if header["refused_file"]:
            raise FileRefused(header["refused_file"])
        if header["error"]:
            raise SandboxFault(header["error"])
        self._raise_if_victim()
        await asyncio.wait_for(asyncio.gather(*(drain.ended.wait() for drain in self.drains)), GRACE)
        return self._outcome(header, blobs)

    def _raise_if_victim(self) -> None:
        if self.group and self.group.is_victim():
            raise SandboxFault("killed because all runs together used up their memory; its own limit was not reached")

    def _outcome(self, header: dict[str, Any], blobs: list[bytes]) -> Outcome:
        commands = []
        for place, ended in enumerate(header["commands"]):
            commands.append(self._command(place, ended["code"], ended["signal"], ended["seconds"], ended["error"]))
            commands[-1].limits += [Limit(name) for name in ended["limits"]]
        last = commands[-1]
        if self.group:
            last.limits += [limit for limit in self.group.reached() if limit not in last.limits]
        last.limits += [limit for limit in _told(last) if limit not in last.limits]
        files = dict(zip(header["fetched"], blobs, strict=True))
        return Outcome(commands, files, header["refused"], header["cpu_seconds"])

    def _command(
        self, place: int, code: int | None, number: int | None, seconds: float, error: str | None = None
    ) -> CommandOutcome:
        out, err = self.drains[2 * place : 2 * place + 2]
        cut = [name for name, drain in (("stdout", out), ("stderr", err)) if drain.cut]
        return CommandOutcome(bytes(out.kept), bytes(err.kept), cut, code, number, seconds, [], error)

    def _flooded(self, seconds: float) -> Outcome:
        return self._killed(seconds, Limit.OUTPUT)

    def _killed(self, seconds: float, limit: Limit) -> Outcome:
        """The outcome of a run that is ended from here: what was read so far of the command that wrote last."""
        place = max(place for place, drain in enumerate(self.drains) if drain.total or not place) // 2
        command = self._command(place, None, 9, seconds)
        command.limits.append(limit)
        return Outcome([command], {}, {}, 0.0)

    def interrupt(self) -> None:
        """SIGINT to a session's interpreter."""
        assert self.control is not None
        with contextlib.suppress(OSError):
            self.control.send(b"i")

    async def close(self) -> None:
        """End the run, if it still runs, and free what it held. All its processes are gone, but for the moment that
        the kernel takes.
        """
        self.closed = True
        for sock in (self.control, self.channel):
            if sock is not None:
                sock.close()
        for drain in self.drains:
            drain.close()
        if self.group:
            self.group.close_fds()
            self.pool.leave(self.group)
        self.pool._slots.give(self._slot)
        self.pool.running -= 1


def _told(command: CommandOutcome) -> list[Limit]:
    """Limits that the kernel told only the program about, by an error that the program printed before it failed."""
    if command.code == 0:
        return []
    tail = command.stderr[-4000:]
    messages = (
        (b"MemoryError", Limit.MEMORY),
        (b"Cannot allocate memory", Limit.MEMORY),
        (b"Too many open files", Limit.OPEN_FILES),
        (b"File too large", Limit.FILE_SIZE),
        (b"can't start new thread", Limit.PROCESSES),
        (b"Resource temporarily unavailable", Limit.PROCESSES),
    )
    return [limit for message, limit in messages if message in tail]
