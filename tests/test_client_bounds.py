"""Clients that send headers and bodies slowly, or nothing, beside honest ones: at the sandbox's door, and at the
retriever's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from agentrl.system.body_limit import BodyLimit
from sandbox import client_bounds, gate
from tools.retriever import http_bounds

PATIENCE = 1.5
SLOW = 40
MOST = 1000
"""Bytes of a body."""
MOST_TOGETHER = 4000
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def refusal(status: int, detail: str) -> Response:
    return JSONResponse(detail, status)


@pytest.fixture(params=["sandbox", "retriever"])
async def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A server with little patience that answers the length of a body."""
    app = FastAPI()

    @app.post("/")
    async def size(request: Request) -> Response:
        return Response(str(len(await request.body())))

    for name, value in {"BODY_PATIENCE": PATIENCE, "HEADER_SECONDS": PATIENCE, "HALF_SENT": 8, "FRESH": 0.1}.items():
        monkeypatch.setattr(client_bounds, name, value)
    monkeypatch.setattr(gate, "MAX_BODY", MOST)
    monkeypatch.setattr(gate, "MAX_BODIES", MOST_TOGETHER)
    monkeypatch.setattr(http_bounds, "MAX_BODIES", MOST_TOGETHER)
    more: dict[str, Any] = {"ws": "none", "log_level": "error", "timeout_keep_alive": 3600}
    if request.param == "sandbox":
        config = uvicorn.Config(gate.Gate(app), port=0, http=gate.PatientProtocol, **more)
    else:
        paced = http_bounds.Paced(app, refusal)
        limited = BodyLimit(paced, MOST, refusal)
        config = uvicorn.Config(limited, port=0, http=http_bounds.metered(MOST), **more)
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
    monkeypatch.setattr(client_bounds, "BODY_PATIENCE", 60.0)
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
    assert await dripped(await slow(port, said), b"" if not said else b"x") == b""


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
