"""Servers of a model that is not trained are started again when they end, and when they hang; their ports."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.servers.process import PORT_ATTEMPTS, free_port
from agentrl.engines.sglang.build import SGLANG
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.rollouts.reward_servers.local import RewardServers
from tests.naming import Names, assert_names, naming

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"model_path": "model"}')

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
QUICK = Timings(check_interval=0.2, recheck_interval=0.05, check_timeout=1.0, failures=3)


class Standin(SGLangProcess):
    """A small HTTP server in SGLang's place."""

    started: list[Standin] = []

    def command(self: SGLangProcess, port: int) -> list[str]:
        return [sys.executable, "-S", "-c", SERVER, str(port)]

    def start(self) -> None:
        super().start()
        self.started.append(self)


@pytest.fixture
def warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings of servers that run."""
    monkeypatch.setattr(Standin, "started", [])
    told: list[str] = []
    arguments = SGLangArguments("model", device="cpu")
    software = dataclasses.replace(SGLANG, process=Standin)
    process = Standin(arguments, None, tmp_path / "0.log", key="key")
    servers = RewardServers(software, [process], 60.0, told.append, QUICK)
    servers.start(lambda _: None)
    yield told
    servers.close()
    assert all(process.exited is not None for process in Standin.started)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGSTOP, ("3 checks", "1 s")), (signal.SIGKILL, "ended")])
def test_it_is_started_again(warnings: list[str], number: signal.Signals, said: Names) -> None:
    (process,) = Standin.started
    first, url = process.pid, process.url
    assert first is not None
    time.sleep(1.0)  # some checks
    assert process.pid == first and not warnings, "a server that answers is left alone"
    os.kill(first, number)
    end = time.monotonic() + 60
    while len(Standin.started) == 1 or not answers(url):
        assert time.monotonic() < end, warnings
        time.sleep(0.05)
    assert_names(warnings[0], said)
    assert process.pid != first and len(warnings) == 1 and url in warnings[0]
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.parametrize(("given", "taken"), [(False, 1), (False, PORT_ATTEMPTS), (True, 1)])
async def test_a_port_that_is_taken_before_the_start_is_exchanged_unless_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool, taken: int
) -> None:
    port, others, told = free_port("127.0.0.1"), list[socket.socket](), list[str]()

    def command(process: SGLangProcess, port: int) -> list[str]:
        if len(others) < taken:
            others.append(socket.create_server(("127.0.0.1", port)))
        return Standin.command(process, port)

    monkeypatch.setattr(SGLangProcess, "command", command)
    process = SGLangProcess(SGLangArguments("model", device="cpu"), port if given else None, tmp_path / "0.log")
    process.start()
    first = process.url
    try:
        if given or taken == PORT_ATTEMPTS:
            with naming(EngineError, "OSError"):
                await process.ready(60.0, told.append)
        else:
            await process.ready(60.0, told.append)
            assert told == [f"port {first.rpartition(':')[2]} was taken meanwhile, trying another"]
        assert len(others) == taken and (process.url == first) == given
    finally:
        process.stop()
        for other in others:
            other.close()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1.0):
            return True
    except OSError:
        return False
