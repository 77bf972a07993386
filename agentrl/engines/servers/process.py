"""One SGLang server process of ours: started, watched while it comes up, stopped with all its children.

The server ends with this process, whatever happens to it: see `launch`.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.startup_log import StartupLog, last_error
from agentrl.engines.sglang.launch import STARTER
from agentrl.engines.sglang.options import ServerArguments

PORTS = range(20_000, 32_000)
"""Where free ports are looked for: below those that Linux gives to outgoing connections."""
PORT_ATTEMPTS = 3
LOOK_EVERY = 0.1  # seconds
GRACE = {"cpu": 0.0}
"""Seconds between SIGTERM and SIGKILL by device. On a CPU there is nothing to give back."""
GPU_GRACE = 15.0


class ServerProcess:
    """A server at 127.0.0.1 (or the host that its arguments name)."""

    module = "agentrl.engines.sglang.launch"
    """What is run."""

    def __init__(self, arguments: ServerArguments, port: int | None, log: Path) -> None:
        """`port` None: a free one, and another where somebody else took it first. `log` is appended to."""
        self.arguments = arguments
        self.log = log
        self._fixed_port = port
        self._port = port or 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """Known once the server was started; final, for later starts too, once it was ready."""
        host = self.arguments.host
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Of the main process, which leads the group of all the server's processes; None before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def exited(self) -> int | None:
        """Exit status of the main process (negative: the signal that killed it); None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Spawn the server and return at once. Raises EngineError where its port is taken or it runs already."""
        if self._process is not None and self._process.poll() is None:
            raise EngineError(f"the SGLang server {self.url} runs already")
        if self._fixed_port is None:
            self._port = free_port(self.arguments.host)
        elif not is_free(self.arguments.host, self._fixed_port):
            raise EngineError(f"port {self._fixed_port} of {self.arguments.host} is in use: no SGLang server there")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments.argv(self._port)],
                stdin=subprocess.PIPE,  # never written to: its end tells the server that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.arguments.device),
                start_new_session=True,
            )

    async def ready(self, timeout: float, progress: Callable[[str], None] | None = None) -> None:
        """Wait until the server answers and serves the model that was asked for. `timeout` in seconds.

        `progress` is told what the server does meanwhile, a short line at a time. Raises EngineError, with the
        server's own last error and the log's path, as soon as the process ends or the time is over.
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
        stages = StartupLog()
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
            if (await http.get(f"{self.url}/health")).status_code != 200:
                return False
            served = (await http.get(f"{self.url}/model_info")).json()["model_path"]
        except httpx.HTTPError:
            return False
        if served != self.arguments.model_path:
            raise self._failed(f"serves {served} instead of {self.arguments.model_path}")
        return True

    def _failed(self, what: str) -> EngineError:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        error = last_error(text)
        message = f"the SGLang server {self.url} {what}. Its last error:\n{error}\nIts log: {self.log}"
        kind = _AddressInUse if "address already in use" in text.lower() else EngineError
        return kind(message)

    def stop(self, grace: float | None = None) -> None:
        """End the server; when this returns none of its processes is left.

        SIGTERM first and `grace` seconds to end by itself (by default 15 on GPUs, so that their memory is given back
        in order, and none on a CPU), then SIGKILL to all its processes. Nothing happens where it was not started.
        """
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            grace = GRACE.get(self.arguments.device, GPU_GRACE) if grace is None else grace
            if grace > 0:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
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
    """The server found its port, or one of its inner ones, taken."""


def environment(device: str) -> dict[str, str]:
    """Of a server process: what the user has set stays."""
    ours = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        # A scheduler that crashed would keep its server from ending for more than a minute.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        # What a server reserves at a context's end may lie beyond the model's last position; no token ever does.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cpu":
        ours["OMP_NUM_THREADS"] = "1"  # threads of one server; a small model is slower with more
    return {**ours, **os.environ, STARTER: str(os.getpid())}


def living(group: int) -> Iterator[int]:
    """Ids of the processes of the process group and session `group`, without those that only wait to be reaped."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it has just ended
        if state not in "ZX" and int(process_group) == int(session) == group:
            yield int(stat.parent.name)


def free_port(host: str) -> int:
    """A port that nobody listens at now. Raises EngineError where there is none."""
    for port in random.sample(PORTS, 200):
        if is_free(host, port):
            return port
    raise EngineError(f"no free port between {PORTS.start} and {PORTS.stop} on {host}")


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def status_text(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
