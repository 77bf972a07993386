"""A server process of ours: started, watched while it comes up, stopped with all its children.

The server ends with this process, even after SIGKILL: see `starter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import httpx

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.command_line import ServerArguments
from agentrl.engines.servers.starter import KEY, STARTER
from agentrl.engines.servers.startup_log import Stages, StartupLog, last_error
from agentrl.system.processes import signal_name

PORTS = range(20_000, 32_000)
"""Range that free ports are chosen from: below the range that Linux gives to outgoing connections."""
PORT_ATTEMPTS = 3
LOOK_EVERY = 0.1  # seconds
GPU_GRACE = 15.0
"""Seconds that a server on GPUs has to end by itself, so that their memory is given back in order."""


class ServerProcess(ABC):
    """Starts, watches and stops one server on this machine. Each server software derives its own class."""

    software: ClassVar[str]
    """Name of the server software in messages."""
    stages: ClassVar[Stages]
    """Stages of the start-up, read from the log."""
    aftermath: ClassVar[str]
    """Text in the exceptions of processes that only report the failure of another one."""
    module: ClassVar[str]
    """Main module of the process, which must call `starter.end_with`."""

    def __init__(
        self,
        arguments: ServerArguments,
        port: int | None,
        log: Path,
        *,
        key: str | None = None,
        pass_env: Sequence[str] = (),
    ) -> None:
        """Prepare a server; nothing is started yet.

        Args:
            arguments: with the model that it must serve, and the address that it listens at.
            port: None for a free one, and another where somebody else took it first.
            log: file that its output is appended to.
            key: what its callers have to send, also after a restart; None: it answers everyone.
            pass_env: variables that the server sees, too.
        """
        self.arguments = arguments
        self.log = log
        self.key = key
        self._pass_env = frozenset(pass_env)
        self._model_path = arguments.model_path
        self._host = arguments.host
        self._grace = 0.0 if arguments.device == "cpu" else GPU_GRACE
        self._fixed_port = port
        self._port = port or 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def command(self, port: int) -> list[str]:
        """Build the command that runs the server at `port`."""
        return [sys.executable, "-m", self.module, *self.arguments.argv(port)]

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Build the environment of the server's process. It is all that the process sees, besides `KEY`, `STARTER`."""

    @abstractmethod
    async def served_model(self, http: httpx.AsyncClient) -> str | None:
        """Ask for the path of the model that is served; None while the server is not ready. May raise HTTPError."""

    @property
    def url(self) -> str:
        """Address of the server: known once it was started, the same for later starts once it was ready."""
        return f"http://{'127.0.0.1' if self._host == '0.0.0.0' else self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Id of the main process, which leads the group of all the server's processes; None before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def exited(self) -> int | None:
        """Exit status of the main process (negative: the signal that killed it); None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Spawn the server and return at once. Raises EngineError where its port is taken or it runs already."""
        if self._process is not None and self._process.poll() is None:
            raise EngineError(f"the {self.software} server {self.url} runs already")
        if self._fixed_port is None:
            self._port = free_port(self._host)
        elif not is_free(self._host, self._fixed_port):
            raise EngineError(f"port {self._fixed_port} of {self._host} is in use: no {self.software} server there")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.command(self._port),
                stdin=subprocess.PIPE,  # never written to: its end tells the server that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment(), STARTER: str(os.getpid()), **({} if self.key is None else {KEY: self.key})},
                start_new_session=True,
            )

    async def ready(self, timeout: float, progress: Callable[[str], None] | None = None) -> None:
        """Wait up to `timeout` seconds until the server answers and serves the model that was asked for.

        `progress` shows the stages of its start-up, a short line each. Raises EngineError, with the server's own last
        error and the log's path, as soon as the process ends or the time is over.
        """
        say = progress or (lambda _: None)
        for attempt in range(1, PORT_ATTEMPTS + 1):
            try:
                await self._wait(timeout, say)
                self._fixed_port = self._port  # started again, it is found where it was
                return
            except _AddressInUse as error:
                if self._fixed_port is not None or attempt == PORT_ATTEMPTS:
                    raise EngineError(str(error)) from None
                say(f"port {self._port} was taken meanwhile, trying another")
                self.start()

    async def _wait(self, timeout: float, say: Callable[[str], None]) -> None:
        start = time.monotonic()
        stages = StartupLog(self.stages)
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                while True:
                    for stage in stages.read(log.read().decode(errors="replace")):
                        say(stage)
                    if (status := self.exited) is not None:
                        await asyncio.to_thread(self.stop)
                        raise self._failed(f"ended while it was starting ({status_text(status)})")
                    if await self._serves(http):
                        return
                    if time.monotonic() - start > timeout:
                        raise self._failed(f"is not ready after {timeout:.0f} s")
                    await asyncio.sleep(LOOK_EVERY)

    async def _serves(self, http: httpx.AsyncClient) -> bool:
        try:
            served = await self.served_model(http)
        except httpx.HTTPError:
            return False
        if served is not None and served != self._model_path:
            raise self._failed(f"serves {served} instead of {self._model_path}")
        return served is not None

    def _failed(self, what: str) -> EngineError:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        error = last_error(text, self.aftermath)
        message = f"the {self.software} server {self.url} {what}. Its last error:\n{error}\nIts log: {self.log}"
        kind = _AddressInUse if "address already in use" in text.lower() else EngineError
        return kind(message)

    def stop(self) -> None:
        """End the server; when this returns all its processes have ended.

        SIGTERM first and `grace` seconds to end by itself, then SIGKILL to all its processes. Does nothing where it was
        not started.
        """
        process = self._process
        if process is None:
            return
        if process.poll() is None and self._grace > 0:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._grace)
        while any(True for _ in living(process.pid)):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                break
            time.sleep(0.01)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


class _AddressInUse(EngineError):
    """Raised when the server found its port, or one of its inner ones, taken."""


def living(group: int) -> Iterator[int]:
    """Yield the ids of the processes of the process group and session `group`, except zombies."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it has just ended
        if state not in "ZX" and int(process_group) == int(session) == group:
            yield int(stat.parent.name)


def free_port(host: str) -> int:
    """Find a port that nobody listens at now. Raises EngineError without a free port."""
    for port in random.sample(PORTS, 200):
        if is_free(host, port):
            return port
    raise EngineError(f"no free port between {PORTS.start} and {PORTS.stop} on {host}")


def is_free(host: str, port: int) -> bool:
    """True when a socket can be bound to the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def status_text(status: int) -> str:
    """Describe an exit status as `subprocess` gives it."""
    return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"
