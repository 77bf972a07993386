"""MCP servers at a URL: one written with the official SDK, and one of the older protocol that misbehaves."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from agentrl.errors import ConfigError
from agentrl.tool.session import ToolInfrastructureError
from agentrl.trajectory import ToolAnswer
from tests.naming import naming
from tests.remote.conftest import Faulty, Handler, breaks, says
from tests.tools.test_mcp_stdio import load, running, told

ROOT = Path(__file__).parents[2]


class SdkServer:
    """tests.tools.mcp_server at a port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.tools.mcp_server", str(self.port)]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError("the server does not listen")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def sdk() -> Iterator[SdkServer]:
    server = SdkServer()
    server.start()
    yield server
    server.kill()


async def test_a_server_that_is_restarted_in_mid_call(tmp_path: Path, sdk: SdkServer) -> None:
    tools = load(tmp_path, {"url": sdk.url, "tools": ["add", "slow", "refuse"], "breaker_seconds": 0.2}, 60.0)
    assert tools.names == ["add", "slow", "refuse"]
    async with running(tools) as session:
        assert await told(session, "add", a=2, b=3) == "5"
        refused = await session.call("refuse", {"why": "too late"})
        assert refused.text == "Error (execution): Error executing tool refuse: too late"
        calls = [session.call("add", {"a": n, "b": 0, "seconds": 1.0}) for n in range(40)]
        working = asyncio.gather(*calls, session.call("slow", {"seconds": 1.0}), return_exceptions=True)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(sdk.kill)
        await asyncio.to_thread(sdk.start)
        *answers, slow = await working
        assert [answer.text for answer in answers if isinstance(answer, ToolAnswer)] == [str(n) for n in range(40)]
        assert isinstance(slow, ToolInfrastructureError)
        assert "the connection broke" in str(slow)
        assert await told(session, "add", a=2, b=3) == "5"


class OldServer:
    """The protocol of 2025-06-18, with sessions. Its tool counts by session; `faults` are used up one a call."""

    def __init__(self) -> None:
        self.faults: list[Handler] = []
        self.sessions: dict[str, int] = {}
        self.ended: list[str] = []
        self.asked: list[web.Request] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        session = request.headers.get("mcp-session-id", "")
        if request.method == "GET":
            return web.Response(status=405)
        if request.method == "DELETE":
            self.ended.append(session)
            return web.Response()
        message = await request.json()
        number, method = message.get("id"), message["method"]
        if method == "initialize":
            new = secrets.token_hex(4)
            self.sessions[new] = 0
            result = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "old", "version": "1"},
            }
            return self.answer(number, result, {"mcp-session-id": new})
        if session not in self.sessions:
            return web.json_response({"detail": "no such session"}, status=404)
        if number is None:
            return web.Response(status=202)
        if method == "tools/list":
            hints = {"idempotentHint": True}
            tool = {"name": "count", "inputSchema": {"type": "object"}, "annotations": hints}
            return self.answer(number, {"tools": [tool]})
        if self.faults:
            return await self.faults.pop(0)(request)
        self.sessions[session] += 1
        return self.answer(number, {"content": [{"type": "text", "text": str(self.sessions[session])}]})

    @staticmethod
    def answer(number: object, result: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
        return web.json_response({"jsonrpc": "2.0", "id": number, "result": result}, headers=headers)


@pytest.fixture
async def old(faulty: Faulty) -> OldServer:
    server = OldServer()
    server.url = f"{(await faulty(server.handle)).url}mcp"
    return server


async def breaks_in_an_event_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'event: message\ndata: {"jsonrpc": "2.0", "id"')
    assert request.transport is not None
    request.transport.abort()
    return response


def floods(written: list[int]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": request.headers["x-flood"]})
        await response.prepare(request)
        for megabyte in range(100):
            await response.write(b"x" * (1 << 20))
            written.append(megabyte)
        return response

    return handler


def hangs(kind: str, gone: asyncio.Event) -> Handler:
    """Says that it answers, and does not, until the client has gone."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        if kind:
            await response.prepare(request)
        while request.transport is not None:
            await asyncio.sleep(0.02)
        gone.set()
        return response

    return handler


async def load_in_thread(folder: Path, config: dict[str, Any]) -> Any:
    """The server under test runs in this event loop, and loading waits for it."""
    return await asyncio.to_thread(load, folder, config)


@pytest.mark.parametrize(
    "fault",
    [
        says(500),
        says(503, retry_after="0"),
        says(429),
        breaks,
        breaks_in_an_event_stream,
        says(404),
        says(400, "session?"),
    ],
)
async def test_faults_that_pass(tmp_path: Path, old: OldServer, fault: Handler) -> None:
    """The call is made again, in a new session where the server no longer knows the old one; no other call notices."""
    tools = await load_in_thread(tmp_path, {"url": old.url})
    async with running(tools) as session:
        assert await told(session, "count") == "1"
        old.faults = [fault]
        await asyncio.gather(*(told(session, "count") for _ in range(5)))
        assert sum(old.sessions.values()) == 6
    assert len(old.ended) >= 2  # sessions are ended in order: that of the listing, and that of the run


@pytest.mark.parametrize(
    ("fault", "says_so"),
    [
        (says(302, location="http://127.0.0.1:1/"), "status 302"),
        (says(401, "who are you, the-token?"), r"status 401: who are you, \[secret\]\?"),
        (says(200, "<html>", content_type="text/html"), "Unexpected content type"),
        (says(200, "{", content_type="application/json"), "Failed to parse"),
    ],
)
async def test_faults_that_stay(
    tmp_path: Path, old: OldServer, fault: Handler, says_so: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_TOKEN", "the-token")
    tools = await load_in_thread(tmp_path, {"url": old.url, "auth_env": "MCP_TOKEN"})
    async with running(tools) as session:
        old.faults = [fault]
        try:
            said = (await session.call("count", {})).text
        except ToolInfrastructureError as error:
            said = str(error)
        assert re.search(says_so, said)
        assert await told(session, "count") == "1"
    assert old.asked[-1].headers["Authorization"] == "Bearer the-token"


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain"])
async def test_an_answer_of_100_megabytes(tmp_path: Path, old: OldServer, kind: str) -> None:
    servers = {"mcpServers": {"old": {"url": old.url, "headers": {"x-flood": kind}}}}
    (tmp_path / "mcp.json").write_text(json.dumps(servers))
    config = {"servers_file": str(tmp_path / "mcp.json"), "max_answer_bytes": 1 << 20, "attempts": 1}
    tools = await load_in_thread(tmp_path, config)
    async with running(tools) as session:
        written: list[int] = []
        old.faults = [floods(written)]
        with pytest.raises(ToolInfrastructureError, match=r"longer than|exceeded the 1048576 byte limit"):
            await session.call("count", {})
        assert len(written) < 50
        assert await told(session, "count") == "1"


@pytest.mark.parametrize("kind", ["", "application/json", "text/event-stream"])
async def test_a_call_that_is_given_up_leaves_no_connection(tmp_path: Path, old: OldServer, kind: str) -> None:
    tools = await load_in_thread(tmp_path, {"url": old.url, "timeout": 3.0})
    gone = asyncio.Event()
    async with running(tools) as session:
        old.faults = [hangs(kind, gone)]
        with pytest.raises(ToolInfrastructureError, match=r"no answer within 2\.[678]\d* s"):
            await session.call("count", {})
        assert await told(session, "count") == "1"
        async with asyncio.timeout(10):
            await gone.wait()
        assert await told(session, "count") == "2"


async def test_a_session_for_each_trajectory(tmp_path: Path, old: OldServer) -> None:
    tools = await load_in_thread(tmp_path, {"url": old.url, "session": "trajectory"})
    await tools.start("a-run")
    first, second = await tools.open("one", {}), await tools.open("two", {})
    assert [await told(first, "count"), await told(first, "count"), await told(second, "count")] == ["1", "2", "1"]
    lost = next(name for name, count in old.sessions.items() if count == 2)
    del old.sessions[lost]
    with naming(ToolInfrastructureError, "connection"):
        await first.call("count", {})
    assert await told(second, "count") == "2"
    for session in (first, second):
        await session.close()
    await tools.close()
    assert set(old.sessions) <= set(old.ended)


async def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MCP server http://127.0.0.1:1/mcp: no connection \(Cannot connect"):
        load(tmp_path, {"url": "http://127.0.0.1:1/mcp"})


async def test_a_server_is_asked_by_a_proxy(tmp_path: Path, sdk: SdkServer) -> None:
    """The server itself stands for the proxy: it is given the address of one that is nowhere."""
    proxy = sdk.url.removesuffix("/mcp")
    tools = load(tmp_path, {"url": "http://localhost:1/mcp", "tools": ["add"], "proxy": proxy}, 60.0)
    async with running(tools) as session:
        assert await told(session, "add", a=2, b=3) == "5"
    with naming(ConfigError, "proxy", "command", "no effect"):
        load(tmp_path, {"command": ["x"], "proxy": proxy})
