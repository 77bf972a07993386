"""The supervisor of one run: puts the files in place, starts the commands, enforces what time and the kernel do not,
and ends every process.

In tiers with namespaces it is pid 1 of the run's own process namespace: when it ends, for whatever reason, the kernel
kills the rest. In the others it is their subreaper and kills their process group, which they cannot leave. It alone
answers the server; a server that closes the socket cancels the run.

The program shares nothing with it but an ancestor: other capabilities, another user namespace (or another user), no
descriptor in common.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from sandbox import confine, interpreter, memory, root, watch, wire
from sandbox import syscalls as sc
from sandbox.limits import MAX_FETCHED, Limit, Limits
from sandbox.tiers import Tier

TICK = 0.05
"""Seconds between two looks at what the processes use."""


@dataclass(frozen=True, slots=True)
class Post:
    """Settings that a zygote hands to each supervisor that it forks."""

    tier: Tier
    readable: list[str]
    base: str
    """Folder for runs' files in tiers without namespaces."""
    uid: int | None
    filter: bytes


@dataclass(slots=True)
class Ended:
    """The end of one command: status or signal, seconds, limits reached."""

    code: int | None = None
    signal: int | None = None
    seconds: float = 0.0
    limits: list[Limit] = field(default_factory=list)
    error: str | None = None
    """Reason why the command could not be started."""

    def to_json(self) -> dict[str, Any]:
        limits = [str(limit) for limit in self.limits]
        return {
            "code": self.code,
            "signal": self.signal,
            "seconds": self.seconds,
            "limits": limits,
            "error": self.error,
        }


class FileRefused(Exception):
    """A file cannot be put where the request wants it."""


class Cancelled(Exception):
    """The server closed its end."""


def run(control: socket.socket, groups: list[int], pipes: list[int], post: Post) -> None:
    """The whole life of a supervisor. `groups`: files that a process joins its control groups by; `pipes`: stdout and
    stderr of each command, then a session's channel.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL)
    for fd in groups:
        os.write(fd, b"0")
        os.close(fd)
    order, blobs = wire.receive(control)
    limits = Limits.from_json(order["limits"])
    supervisor = Supervisor(control, pipes, post, limits)
    try:
        supervisor.prepare(order, blobs)
        answer, fetched = supervisor.obey(order)
    except Cancelled:
        return
    except OSError as error:
        answer, fetched = {"error": f"{type(error).__name__}: {error}", "refused_file": None}, []
    except FileRefused as refused:
        answer, fetched = {"error": None, "refused_file": str(refused)}, []
    finally:
        supervisor.clean_up()
    with contextlib.suppress(OSError):
        control.sendall(wire.pack(answer, fetched))


class Supervisor:
    """One run. Made in the supervisor's process."""

    def __init__(self, control: socket.socket, pipes: list[int], post: Post, limits: Limits) -> None:
        self.control, self.pipes, self.post, self.limits = control, pipes, post, limits
        self.scratch: str | None = None
        self.home = root.HOME
        self.ended_cpu = 0.0
        self.stdin = b""

    def prepare(self, order: dict[str, Any], blobs: list[bytes]) -> None:
        """Namespaces and folders, then the files."""
        if self.post.tier.namespaces:
            sc.unshare(sc.CLONE_NEWNS | sc.CLONE_NEWIPC | sc.CLONE_NEWNET | sc.CLONE_NEWUTS)
            socket.sethostname("sandbox")
            sc.loopback_up()
            root.own_parts(self.limits)
            memory.limit_tcp()
            self.temporary = "/tmp"
        else:
            sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
            self.scratch = tempfile.mkdtemp(prefix="run-", dir=self.post.base)
            os.chmod(self.scratch, 0o711)
            self.home, self.temporary = f"{self.scratch}/home", f"{self.scratch}/tmp"
            for folder in (self.home, self.temporary):
                os.mkdir(folder)
        self.stdin = blobs.pop() if order["stdin"] else b""
        for path, blob in zip(order["files"], blobs, strict=True):
            target = Path(self.home, inside(path))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(blob)
            except OSError as error:
                raise FileRefused(f"{path}: {error.strerror}") from error
        if self.post.uid is not None and self.scratch:
            for folder, _, files in os.walk(self.scratch):
                for name in (".", *files):
                    os.chown(os.path.join(folder, name), self.post.uid, self.post.uid)
            os.chown(self.scratch, 0, 0)

    def obey(self, order: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Run the commands, up to the first that fails, and fetch what was asked for."""
        ended: list[Ended] = []
        channel = self.pipes.pop() if order.get("session") else None
        for place, command in enumerate(order["commands"]):
            out, err = self.pipes[2 * place : 2 * place + 2]
            last = place == len(order["commands"]) - 1
            ended.append(self.command(command, out, err, channel, self.stdin if last else b""))
            if ended[-1].code != 0:
                break
        fetched, blobs, refused = self.fetch(order["fetch"])
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "error": None,
            "refused_file": None,
            "commands": [one.to_json() for one in ended],
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "largest_process": used.ru_maxrss << 10,
            "fetched": fetched,
            "refused": refused,
        }, blobs

    def command(self, command: dict[str, Any], out: int, err: int, channel: int | None, stdin: bytes) -> Ended:
        """Start one command and see it to its end, and the end of all that it started."""
        cell = confine.Cell(
            tier=self.post.tier,
            limits=self.limits,
            home=self.home,
            scratch=self.scratch or "",
            readable=self.post.readable,
            uid=self.post.uid,
            environment={**command["environment"], "HOME": self.home, "TMPDIR": self.temporary},
            filter=self.post.filter,
        )
        ended, started = Ended(), time.monotonic()
        listen, report = os.pipe()
        zero = _readable_once(stdin)
        pid = os.fork()
        if pid == 0:
            kept = {} if channel is None else {3: channel}
            confine.enter(cell, (zero, out, err), kept, report, lambda: _program(command, cell, channel is not None))
        for fd in (report, zero, out, err):
            os.close(fd)
        with open(listen, "rb") as file:
            ended.error = file.read().decode(errors="replace") or None
        status = self.see_out(pid, started + command["seconds"], ended)
        ended.seconds = time.monotonic() - started
        if os.WIFSIGNALED(status):
            ended.signal = os.WTERMSIG(status)
        elif ended.error is None:
            ended.code = os.waitstatus_to_exitcode(status)
        named = {int(signal.SIGXCPU): Limit.CPU_TIME, int(signal.SIGXFSZ): Limit.FILE_SIZE}.get(ended.signal or 0)
        if named and named not in ended.limits:
            ended.limits.append(named)
        return ended

    def see_out(self, pid: int, deadline: float, ended: Ended) -> int:
        """Wait for `pid` until it ends, a limit is reached or the server asks. No process is left then. Its wait
        status.
        """
        done = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(done, select.POLLIN)
        poll.register(self.control.fileno(), select.POLLIN)
        try:
            while not ended.limits:
                left = deadline - time.monotonic()
                events = dict(poll.poll(max(0.0, min(TICK, left)) * 1000))
                if self.control.fileno() in events:
                    self.heed(pid)
                if done in events:
                    break
                if time.monotonic() >= deadline:
                    ended.limits.append(Limit.WALL_TIME)
                elif reached := self.over(pid):
                    ended.limits.append(reached)
                self.reap(pid)
        finally:
            os.close(done)
            status = self.kill_all(pid)
        if self.post.tier.namespaces:
            ended.limits += [limit for limit, hit in zip((Limit.DISK, Limit.INODES), root.full(), strict=True) if hit]
        if self.cpu() >= self.limits.cpu_seconds and Limit.CPU_TIME not in ended.limits:
            ended.limits.append(Limit.CPU_TIME)
        return status

    def heed(self, pid: int) -> None:
        """The server interrupts a session's cell, or goes."""
        if self.control.recv(1) != b"i":
            raise Cancelled
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)

    def over(self, pid: int) -> Limit | None:
        """A limit that the processes are beyond now."""
        now = watch.usage(None if self.post.tier.namespaces else pid)
        if now.cpu_seconds + self.cpu() > self.limits.cpu_seconds:
            return Limit.CPU_TIME
        if now.threads > self.limits.processes + 1:
            return Limit.PROCESSES
        if self.post.tier is not Tier.CGROUP and self.memory(now.pids) > self.limits.memory_bytes:
            return Limit.MEMORY
        if self.scratch:
            size, count = watch.folder_usage(self.scratch, self.limits.inodes)
            if size > self.limits.disk_bytes:
                return Limit.DISK
            if count > self.limits.inodes:
                return Limit.INODES
        return None

    def memory(self, pids: list[int]) -> int:
        """Bytes that the processes hold, or more where that is within the limit."""
        files = 0
        if self.post.tier.namespaces:
            state = os.statvfs("/tmp")
            files = (state.f_blocks - state.f_bfree) * state.f_frsize
        limits, own_network = self.limits, self.post.tier.namespaces
        return memory.held(pids, files, limits.memory_bytes, limits.open_files, own_network=own_network)

    def cpu(self) -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def reap(self, main: int) -> None:
        """Collect orphans that have ended, so that they do not count; the main process is waited for elsewhere."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid == main:
                return
            os.waitpid(found.si_pid, 0)

    def kill_all(self, main: int) -> int:
        """Kill until nobody is left. `main` has not been waited for, so that its process group's number is still its
        own. Its wait status.
        """
        status = 0
        while True:
            with contextlib.suppress(ProcessLookupError):
                if self.post.tier.namespaces:
                    os.kill(-1, signal.SIGKILL)
                else:
                    os.killpg(main, signal.SIGKILL)
            try:
                pid, found = os.waitpid(-1, 0)
            except ChildProcessError:
                return status
            if pid == main:
                status = found

    def fetch(self, paths: list[str]) -> tuple[list[str], list[bytes], dict[str, str]]:
        """Regular files beneath the home folder or /tmp; of others, why not."""
        fetched: list[str] = []
        blobs: list[bytes] = []
        refused: dict[str, str] = {}
        for path in paths:
            try:
                blobs.append(self.read(path, MAX_FETCHED - sum(len(blob) for blob in blobs)))
                fetched.append(path)
            except (OSError, ValueError) as error:
                refused[path] = getattr(error, "strerror", None) or str(error)
        return fetched, blobs, refused

    def read(self, path: str, most: int) -> bytes:
        pure = PurePosixPath(path)
        folder = self.home
        for base, place in ((self.home, self.home), (root.HOME, self.home), ("/tmp", self.temporary)):
            if pure.is_absolute() and pure.is_relative_to(base):
                folder, pure = place, pure.relative_to(base)
                break
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = sc.open_beneath(directory, inside(str(pure)), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        finally:
            os.close(directory)
        with open(fd, "rb") as file:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode):
                raise ValueError("not a regular file")
            if state.st_size > most:
                raise ValueError(f"larger than the {most} bytes that are left of {MAX_FETCHED}")
            return file.read(most)

    def clean_up(self) -> None:
        """Files outside a namespace of the run's own. By `rm`, which no depth of folders defeats."""
        if self.scratch:
            subprocess.run(["chmod", "-R", "u+rwx", self.scratch], stderr=subprocess.DEVNULL)
            subprocess.run(["rm", "-rf", self.scratch], stderr=subprocess.DEVNULL)
            shutil.rmtree(self.scratch, ignore_errors=True)


def _program(command: dict[str, Any], cell: confine.Cell, session: bool) -> int:
    """Run a script or cells in this warm interpreter, or another program. Called in the confined process."""
    report = 4 if session else 3
    if command["argv"] is not None:
        return confine.exec_program(command["argv"], cell.environment, report)
    confine.python_starts(cell.environment, report, cell.home)
    if session:
        return interpreter.run_cells(3)
    return interpreter.run_script(f"{cell.home}/{command['script']}", command["arguments"], command["show_last"])


def _readable_once(data: bytes) -> int:
    """A descriptor that gives `data`, then the end."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY)
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def inside(path: str) -> str:
    """`path` if it stays beneath the folder that it is relative to; raises ValueError."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts or not pure.parts or len(path) > 1024:
        raise ValueError(f"{path!r} is not a path beneath the working directory")
    return str(pure)
