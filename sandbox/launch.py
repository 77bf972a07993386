"""A zygote's process, seen from the server: started, spoken to, and started anew when it dies."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from sandbox import zygote
from sandbox.tiers import Tier

UNPRIVILEGED = 64_200
"""The user that a server run by root becomes, and the first of the runs' users where each has its own."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
}


class SandboxFault(Exception):
    """The sandbox failed, not the program: nothing can be said about the program."""


class ZygoteProcess:
    """One zygote, started anew when it dies."""

    def __init__(self, tier: Tier, preload: Sequence[str], readable: Sequence[str], base: str) -> None:
        self.tier, self.preload, self.readable, self.base = tier, list(preload), list(readable), base
        self.loaded: list[str] = []
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._place = ""
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Raises SandboxFault with the zygote's own error."""
        self.starts += 1
        self._place = tempfile.mkdtemp(prefix="zygote-", dir=self.base)
        os.chmod(self._place, 0o711)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup: dict[str, Any] = {
            "tier": self.tier,
            "preload": self.preload,
            "place": self._place,
            "readable": self.readable,
            "uid": UNPRIVILEGED,
        }
        with theirs:
            self._process = subprocess.Popen(
                zygote.launch_command(json.dumps(setup), theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        ours.setblocking(False)
        self._socket = ours
        try:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 1 << 16), 60)
        except TimeoutError:
            data = b""
        answer: dict[str, Any] = json.loads(data) if data else {"error": "it ended, or said nothing for 60 s"}
        if answer["error"]:
            await self.stop()
            raise SandboxFault(f"the zygote of tier {self.tier} did not start: {answer['error']}")
        self.loaded = answer["loaded"]

    async def fork(self, fds: list[int], groups: int, slot: int) -> None:
        """Have a supervisor started that holds `fds`. Raises SandboxFault."""
        message = json.dumps({"groups": groups, "slot": slot}).encode()
        for attempt in range(2):
            async with self._lock:
                if self._socket is None or self._process is None or self._process.poll() is not None:
                    await self.stop()
                    await self.start()
            try:
                await self._send(message, fds)
                return
            except (BrokenPipeError, ConnectionResetError) as error:
                if attempt:
                    raise SandboxFault(f"the zygote is gone: {error}") from error

    async def _send(self, message: bytes, fds: list[int]) -> None:
        assert self._socket is not None
        while True:
            try:
                socket.send_fds(self._socket, [message], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.002)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                await asyncio.sleep(0.002)

    async def stop(self) -> None:
        """Stop the zygote and all its runs, which are gone when this returns."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None
        if self._place:
            await asyncio.to_thread(
                subprocess.run, ["rm", "-rf", "--one-file-system", self._place], stderr=subprocess.DEVNULL
            )
