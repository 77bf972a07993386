"""What the server of an environment that is started by hand takes: its client's requests, and nothing else."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from agentrl.environments import serve
from tests.agent_loop.test_environments import ODD
from tests.waiting import wait_for

HEAD = {"Host": "127.0.0.1", "Authorization": "Bearer key", "Content-Type": "application/json", "Content-Length": "2"}


class Answers:
    """Stand-in for an environment: says what it was asked."""

    def answer(self, path: str, asked: dict[str, object]) -> bytes:
        return json.dumps([path, asked]).encode()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(serve, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(serve.Handler, "environment", cast(serve.Environment, Answers()), raising=False)
    monkeypatch.setattr(serve.Handler, "key", "key")
    with serve.Server(("127.0.0.1", 0), serve.Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def request(body: bytes = b"{}", path: str = "/v1/step", **changes: str | None) -> bytes:
    head = {**HEAD, **{name.replace("_", "-"): value for name, value in changes.items()}}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items() if value is not None)]
    return "\r\n".join([*lines, "", ""]).encode() + body


def said(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send parts; return all that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:
                break
            time.sleep(pause)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "[::1]:9000", "localhost:9000", "LOCALHOST"])
def test_its_clients_requests_are_answered_on_one_connection(port: int, host: str) -> None:
    found = said(port, request(b'{"a": 1}', Content_Length="8", Host=host), request(Host=host))
    assert found.count(b"HTTP/1.1 200") == 2
    assert b'["/v1/step", {"a": 1}]' in found


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"Authorization": None}, 401),
        ({"Authorization": "Bearer kez"}, 401),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": None}, 415),
        ({"Host": "evil.example"}, 421),
        ({"Host": None}, 421),
        ({"Content_Length": None}, 411),
        ({"Content_Length": "-2"}, 411),
        ({"Content_Length": "2\r\nContent-Length: 90"}, 411),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({"Content_Length": str(1 << 40)}, 413),
    ],
)
def test_a_refused_request_ends_its_connection(port: int, changes: dict[str, str | None], status: int) -> None:
    """Its body is a request, which is not read as one."""
    found = said(port, request(request(), "/v1/step", **changes))
    assert found.startswith(f"HTTP/1.1 {status}".encode())
    assert found.count(b"HTTP/1.1 ") == 1
    assert b"200" not in found.split(b"\r\n", 1)[0] and b"/v1/step" not in found


@pytest.mark.parametrize("body", [b"[]", b"1}", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(port: int, body: bytes) -> None:
    assert said(port, request(body, Content_Length=str(len(body)))).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "parts",
    [[b"POST /v1/step HT"], [b"X: 1\r\n"] * 40, [request(b'{"a', Content_Length="8")], [request() + b"POST"]],
    ids=["half head", "endless head", "half body", "idle"],
)
def test_a_request_that_does_not_arrive_in_time_keeps_no_thread(port: int, parts: list[bytes]) -> None:
    before = threading.active_count()
    if parts[0] == b"X: 1\r\n":
        parts = [b"POST /v1/step HTTP/1.1\r\n", *parts]
    said(port, *parts, pause=0.05)
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() <= before


def test_started_by_hand_it_prints_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.KEY, raising=False)
    (tmp_path / "odd.py").write_text(ODD)
    command = [sys.executable, "agentrl/environments/serve.py", str(tmp_path / "odd.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            ask = request(path="/v1/environment", Authorization=f"Bearer {told['key']}", Connection="close")
            assert said(told["port"], ask).startswith(b"HTTP/1.1 200")
            assert said(told["port"], request(Authorization=None)).startswith(b"HTTP/1.1 401")
        finally:
            process.kill()


def has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_silent_connections_give_way_to_a_new_one(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no key, and each is a file and a thread."""
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 60.0)
    monkeypatch.setattr(serve, "most_connections", lambda: 20)
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(60)]
    for _ in range(3):
        assert b" 200 " in said(port, request(Connection="close"))
    wait_for(lambda: sum(has_ended(connection) for connection in silent) >= 50)  # whichever began to wait first
    wait_for(lambda: threading.active_count() <= before + 12)
    for connection in silent:
        connection.close()
