"""A real retriever as its own process, on loopback."""

from __future__ import annotations

import re
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.waiting import wait_for


class RetrieverProcess:
    """`python -m tools.retriever serve`; up when it is made."""

    def __init__(self, index: Path, *options: str, port: int = 0) -> None:
        run = [sys.executable, "-m", "tools.retriever", "serve", str(index), "--port", str(port), *options]
        self.process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            assert ready.select(timeout=60)
        self.line = self.process.stdout.readline()
        found = re.search(r"POST (http://127\.0\.0\.1:(\d+))/retrieve", self.line)
        assert found, self.line + self.process.stdout.read()
        self.url, self.port = found[1], int(found[2])
        wait_for(lambda: self.answers("/health"))

    def answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> list[int]:
        """Process ids of the children that listen."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in children.split()}
        return [child for child, command in commands.items() if "spawn_main" in command]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit status."""
        self.process.send_signal(number)
        return self.process.wait(20)
