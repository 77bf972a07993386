"""Clients that send headers and bodies slowly, or nothing, beside honest ones: at the sandbox's door, and at the front
of all other servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from agentrl.openai_api import Endpoint
from agentrl.system import client_bounds as our_bounds
from agentrl.system import front
from agentrl.view.__main__ import configured, listening
from sandbox import client_bounds, gate

PATIENCE = 1.5
SLOW = 40
MOST = 1000
"""Bytes of a body."""
MOST_TOGETHER = 4000
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def refusal(status: int, detail: str) -> Response:
    return JSONResponse(detail, status)


def set_both(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    for module in (client_bounds, our_bounds):
        monkeypatch.setattr(module, name, value)


def test_both_sides_have_the_same_file() -> None:
    assert Path(client_bounds.__file__).read_bytes() == Path(our_bounds.__file__).read_bytes()


@pytest.fixture(params=["sandbox", "front"])
async def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A server with little patience that answers the length of a body."""
    app = FastAPI()

    @app.post("/")
    async def size(request: Request) -> Response:
        return Response(str(len(await request.body())))

    for name, value in {"BODY_PATIENCE": PATIENCE, "HEADER_SECONDS": PATIENCE, "HALF_SENT": 8, "FRESH": 0.1}.items():
        set_both(monkeypatch, name, value)
    monkeypatch.setattr(gate, "MAX_BODY", MOST)
    monkeypatch.setattr(gate, "MAX_BODIES", MOST_TOGETHER)
    monkeypatch.setattr(front, "MAX_BODIES", MOST_TOGETHER)
    more: dict[str, Any] = {"ws": "none", "log_level": "error", "timeout_keep_alive": 3600}
    if request.param == "sandbox":
        config = uvicorn.Config(gate.Gate(app), port=0, http=gate.PatientProtocol, **more)
    else:
        config = uvicorn.Config(front.fronted(app, MOST, refusal), port=0, http=front.metered(MOST), **more)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def slow(port: int, said: bytes) -> Stream:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    return reader, writer


async def dripped(stream: Stream, drop: bytes = b"x") -> bytes:
    """What the server says to a client that sends a byte every 50 ms."""
    reader, writer = stream
    answer = asyncio.create_task(reader.read())
    try:
        for _ in range(200):
            if (await asyncio.wait({answer}, timeout=0.05))[0]:
                return answer.result()
            writer.write(drop)
        raise AssertionError("the server waits on")
    except ConnectionResetError:
        return b"reset"
    finally:
        answer.cancel()
        writer.close()


async def ask(port: int) -> list[int]:
    """Statuses of honest requests, whose heads and bodies come apart."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answers = await asyncio.gather(*(client.post("/", content=b"x" * 400) for _ in range(4)))
        return [answer.status_code for answer in answers]


DECLARED = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"


async def test_bodies_that_are_declared_and_do_not_come_cost_nobody_else_anything(port: int) -> None:
    waiting = [await slow(port, DECLARED + b"x") for _ in range(SLOW)]
    await asyncio.sleep(0.2)
    for _ in range(5):
        assert await ask(port) == [200] * 4
    said = await asyncio.gather(*(asyncio.wait_for(dripped(stream), 10) for stream in waiting))
    statuses = [one.split(b" ", 2)[1] for one in said if one != b"reset"]
    assert set(statuses) <= {b"408", b"429"} and b"408" in statuses


async def test_only_so_many_half_sent_bodies_of_an_address_are_kept(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest give way, and none that has just begun."""
    set_both(monkeypatch, "BODY_PATIENCE", 60.0)
    waiting = [await slow(port, DECLARED) for _ in range(SLOW)]
    assert await ask(port) == [200] * 4
    await asyncio.sleep(0.2)
    assert await ask(port) == [200] * 4  # makes the oldest give way
    await asyncio.sleep(0.05)
    left = [stream for stream in waiting if not stream[0].at_eof() and not stream[0]._buffer]  # type: ignore[attr-defined]
    assert 0 < len(left) <= 8 and left[-1] is waiting[-1] and left[0] is not waiting[0]
    assert (await waiting[0][0].read()).startswith(b"HTTP/1.1 429")
    for _, writer in waiting:
        writer.close()


@pytest.mark.parametrize("head", [b"Content-Length: 900", b"Transfer-Encoding: chunked"])
async def test_a_body_has_to_come_at_a_rate(port: int, head: bytes) -> None:
    drop = b"x" if b"Length" in head else b"1\r\nx\r\n"
    said = await dripped(await slow(port, b"POST / HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % head), drop)
    assert said.startswith((b"HTTP/1.1 408", b"HTTP/1.1 411", b"reset"))  # reset: a byte met the closed connection


@pytest.mark.parametrize("said", [b"", b"POST / HTTP/1.1\r\nX-A: "])
async def test_a_request_has_to_begin(port: int, said: bytes) -> None:
    # A byte may meet the closed connection.
    assert await dripped(await slow(port, said), b"" if not said else b"x") in (b"", b"reset" if said else b"")


WHOLE = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"


@pytest.mark.parametrize("count", [1, 2])
async def test_a_request_that_begins_before_the_last_answer_has_to_end(port: int, count: int) -> None:
    """Its beginning comes in one piece with whole requests, which are answered; nothing more comes."""
    reader, writer = await slow(port, count * WHOLE + b"POST / HTTP/1.1\r\nX-A: ")
    said = await asyncio.wait_for(reader.read(), 60)
    assert said.count(b"HTTP/1.1 200") == said.count(b"HTTP/1.1") == count
    writer.close()


async def test_a_connection_without_a_request_is_kept(port: int) -> None:
    """Time for a head begins with its first byte: a client may wait for longer before it asks again."""
    reader, writer = await slow(port, WHOLE)
    await reader.readuntil(b"\r\n\r\n2")
    await asyncio.sleep(2 * PATIENCE)
    writer.write(WHOLE)
    assert b"200" in await reader.readline()
    writer.close()


async def test_one_address_leaves_room_for_another(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = client_bounds.Bodies(1200)
    one = [bodies.begin("a", 400), bodies.begin("a", 400)]
    one[0].hold(400)
    assert (bodies.room("a"), bodies.room("b")) == (200, 400)
    one[1].hold(bodies.room("a"))
    assert (bodies.room("a"), bodies.room("b")) == (0, 300)
    for body in one:
        body.end()
        body.end()
    assert (bodies.total, bodies.room("a")) == (0, 600)


async def test_headers_are_bounded_to_the_byte(port: int) -> None:
    """However they are read: in one piece, too."""
    for size, status in ((60_000, b"200"), (66_000, b"4"), (100_000, b"4"), (200_000, b"4")):
        said = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nX-A: %b\r\n\r\nab" % (b"a" * size)
        reader, writer = await slow(port, said)
        try:
            answer = await asyncio.wait_for(reader.read(20), 10)
        except ConnectionResetError:
            answer = b""
        assert (answer == b"" and status == b"4") or answer.split(b" ")[1].startswith(status), (size, answer)
        writer.close()


BROKEN = {
    "a chunk's length": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk that is too long": b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n",
    "a chunk's end": b"Transfer-Encoding: chunked\r\n\r\n1\r\nxyz\r\n",
    "two codings": b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
async def test_a_body_that_breaks_off_gets_one_answer_and_no_traceback(port: int, body: bytes) -> None:
    told: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = told.append  # type: ignore[assignment,method-assign]
    logging.getLogger("uvicorn.error").addHandler(handler)
    try:
        reader, writer = await slow(port, b"POST / HTTP/1.1\r\nHost: x\r\n" + body)
        said = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert await ask(port) == [200] * 4
    finally:
        logging.getLogger("uvicorn.error").removeHandler(handler)
    assert said.startswith(b"HTTP/1.1 4") and said.count(b"HTTP/1.1") == 1
    assert [record.getMessage() for record in told] == []


async def silent(port: int, count: int, said: bytes = b"") -> list[Stream]:
    """Connections that ask nothing."""
    return [await slow(port, said) for _ in range(count)]


def is_open(stream: Stream) -> bool:
    return not stream[0].at_eof() and stream[0].exception() is None


async def left(streams: list[Stream], most: int) -> list[Stream]:
    """Connections that the server keeps, once it has at most so many of them."""
    while len(kept := [one for one in streams if is_open(one)]) > most:
        await asyncio.sleep(0.02)
    return kept


@pytest.mark.parametrize("said", [b"", b"POST / HTT"])
async def test_connections_that_ask_nothing_give_way(port: int, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """An address has half of all connections; one whose request is under way stays, and one that has asked stays for
    longer than one that has not.
    """
    set_both(monkeypatch, "most_connections", lambda: 20)
    set_both(monkeypatch, "HEADER_SECONDS", 60.0)
    set_both(monkeypatch, "BODY_PATIENCE", 60.0)
    asked, asking = await slow(port, WHOLE), await slow(port, DECLARED + b"x")
    await asked[0].readuntil(b"\r\n\r\n2")
    streams = await silent(port, 60, said)
    for _ in range(3):
        assert await ask(port) == [200] * 4
    kept = await asyncio.wait_for(left([asked, asking, *streams], 10), 30)
    assert {asked, asking} <= set(kept)
    asking[1].write(b"x" * 899)
    assert b"200" in await asyncio.wait_for(asking[0].readline(), 30)
    for _, writer in [asked, asking, *streams]:
        writer.close()


async def test_where_all_are_busy_a_new_connection_ends(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_both(monkeypatch, "most_connections", lambda: 8)
    set_both(monkeypatch, "BODY_PATIENCE", 60.0)
    busy = await silent(port, 4, DECLARED + b"x")
    await asyncio.sleep(0.2)
    (late,) = await silent(port, 1)
    assert await asyncio.wait_for(left([late], 0), 30) == []
    assert len(await left(busy, 4)) == 4
    for _, writer in [*busy, late]:
        writer.close()


def test_another_address_finds_room() -> None:
    """Half of the connections are one address's, and half of the rest another's."""

    class Silent(client_bounds.Patient):
        def __init__(self, address: str) -> None:
            self.address = address
            self.transport = self  # type: ignore[assignment]
            self.ended = False

        def abort(self) -> None:
            self.ended = True
            connections.remove(self)

    connections, first, second = client_bounds.Connections(), list[Silent](), list[Silent]()
    most = client_bounds.most_connections()
    for made, address in ((first, "a"), (second, "b")):
        for _ in range(most):
            made.append(Silent(address))
            connections.add(made[-1])
    assert [sum(not one.ended for one in made) for made in (first, second)] == [most // 2, (most - most // 2) // 2]


@pytest.mark.parametrize("name", ["endpoint", "viewer"])
async def test_silent_connections_leave_the_server_its_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """No token is needed to be silent, so each server has the front."""
    monkeypatch.setattr(our_bounds, "most_connections", lambda: 40)
    endpoint, server, serving = Endpoint(), None, None
    if name == "endpoint":
        await endpoint.start()
        url = endpoint.url
    else:
        listener = listening("127.0.0.1", 0)
        server = uvicorn.Server(configured(FastAPI()))
        serving = asyncio.create_task(server._serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        while not server.started:
            await asyncio.sleep(0.01)
    streams = await silent(int(url.rpartition(":")[2]), 300)
    kept = await asyncio.wait_for(left(streams, 20), 60)
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(f"{url}/nowhere/v1/models")).status_code == 404
    for _, writer in streams:
        writer.close()
    assert len(kept) == 20
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert caplog.text.count("idle ones end for new ones") == 1
    await endpoint.close()
    if server is not None and serving is not None:
        server.should_exit = True
        await serving
