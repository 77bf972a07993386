"""Processes of agents: what they see of the trainer, what they cost to start, how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from agentrl.errors import CodeError, UserError
from agentrl.openai_api.agent_task import AgentError, AgentFailed, blamed
from agentrl.openai_api.agents import Agent
from agentrl.remote.credentials import Secrets, passed_secrets
from agentrl.system.proxies import spare_own_addresses
from agentrl.system.user_code import PATHS

PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "NODE_PATH", "SSL_CERT_FILE"),
)
"""Environment variables of the trainer that a command sees. All others, and with them the trainer's secrets, it does
not."""
TAIL = 16 << 10
"""Bytes of a command's output that are kept."""
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
    """Process that kills the agents that are left when this process is gone, also by SIGKILL."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def tell(self, group: int) -> None:
        """Send a number to the watching process."""
        if self._process is None:
            command = [sys.executable, "-S", "-c", WATCH]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%d\n" % group)


_WATCH = _Watch()


class ProgramAgent(Agent):
    """Agent that is a program, whose errors are only known by what it writes."""

    name = "agent"
    """Name of the program in messages."""

    def refused(self, failure: AgentFailed, refusal: str) -> UserError:
        return AgentError(str(failure), refusal)

    def error(self, problem: str) -> CodeError:
        return CodeError(f"{self.name}: {problem}")


class AgentProcess(asyncio.SubprocessProtocol):
    """Process in a group of its own. It keeps the tails of its output, and knows when it and its pipes have ended."""

    def __init__(self, secret: str, environment: Mapping[str, str], hidden: Secrets) -> None:
        """`secret`: text in `environment`, which every process that it starts has, too. `hidden`: from messages."""
        loop = asyncio.get_running_loop()
        self.tails = {1: bytearray(), 2: bytearray()}
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.pid = 0
        self._secret, self._environment, self._hidden = secret, environment, hidden
        self._transport: asyncio.SubprocessTransport | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        passed_on: Iterable[str],
        more: Mapping[str, str],
        secret: str,
        *,
        folder: Path | None = None,
        key: str = "openai_proxy.command",
    ) -> AgentProcess:
        """Start a command with the variables `passed_on` of this process, and `more`.

        `folder`: its working folder; None: this process's. Raises AgentError, which names `key`, where the program is
        not there, AgentFailed for other reasons.
        """
        passed_on = tuple(passed_on)
        environment = {name: os.environ[name] for name in (*PASSED_ON, *passed_on) if name in os.environ}
        environment |= more
        spare_own_addresses(environment)
        process = cls(secret, environment, passed_secrets(passed_on))
        try:
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: process, *command, env=environment, cwd=folder, start_new_session=True
            )
        except OSError as error:
            problem = f"{key} {list(command)}: {error}"
            raise (AgentError(problem, problem) if isinstance(error, PATHS) else AgentFailed(problem)) from error
        process._transport, process.pid = transport, transport.get_pid()
        _WATCH.tell(process.pid)
        return process

    @property
    def stdin(self) -> asyncio.WriteTransport:
        assert self._transport is not None
        return cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    @property
    def status(self) -> int | None:
        """Status that it ended with, negative for a signal; None while it runs."""
        return None if self._transport is None else self._transport.get_returncode()

    async def ended(self) -> None:
        """Wait for its end, and kill the processes that it leaves. Cancelled, everything is killed at once."""
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
        marker = self._secret.encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marker in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)

    def said(self, *, both: bool = False) -> str:
        """Return the end of its output: of stderr if it wrote there, else of stdout; `both`: of stdout, then stderr."""
        out, err = (bytes(self.tails[each]).decode(errors="replace").strip() for each in (1, 2))
        return self._hidden.hide(f"{out}\n{err}".strip() if both else err or out)

    def failure(self, name: str, *, both: bool = False) -> AgentError | AgentFailed:
        """Make the error for a process called `name` that ended; `both`: some programs write errors to stdout."""
        status, said = self.status, self.said(both=both)
        assert status is not None
        ended = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        problem = f"{name} ended with {ended}: {said or 'it wrote nothing'}"
        return blamed(problem, said if status > 0 else "", self._secret, self._environment)

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process group has taken so far."""
        total = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = file.read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) if int(fields[2]) == self.pid else 0
        return total / CLOCK_TICKS

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.tails[fd] += data
        del self.tails[fd][:-TAIL]

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
