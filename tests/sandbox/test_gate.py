"""Clients that send too much, too slowly or nothing, against the server's own protocol with short patience."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from sandbox import client_bounds, gate
from tests import framing
from tests.waiting import until

PATIENCE = 0.4
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client_bounds, "HEADER_SECONDS", PATIENCE)
    monkeypatch.setattr(client_bounds, "BODY_PATIENCE", PATIENCE)
    monkeypatch.setattr(client_bounds, "ANSWER_SECONDS", 3 * PATIENCE)
    monkeypatch.setattr(gate, "MAX_BODIES", 2000)
    yield


@pytest.fixture
async def port(hurried: None) -> AsyncIterator[int]:
    app = FastAPI()

    @app.post("/")
    async def size(request: Request, wait: float = 0.0, long: int = 0) -> Response:
        length = len(await request.body())
        await asyncio.sleep(wait)
        return Response(b"x" * long or str(length))

    config = uvicorn.Config(gate.Gate(app), port=0, http=gate.PatientProtocol, ws="none", log_level="error")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def test_no_framing_of_a_body_passes_the_limit(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_BODY", 500)
    monkeypatch.setattr(client_bounds, "HEADER_SECONDS", 20.0)
    await asyncio.to_thread(framing.check, port, 500, b"/")


async def connected(port: int, said: bytes) -> Stream:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    return reader, writer


async def answer(stream: Stream) -> bytes:
    """All that the server says until it closes the connection."""
    try:
        return await asyncio.wait_for(stream[0].read(), 20)
    except ConnectionResetError:
        return b"reset"
    finally:
        stream[1].close()


@pytest.mark.parametrize("said", [b"", b"POST / HTTP/1.1\r\nHost: x\r\nX-A: ", b"POST / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_connection_that_says_no_request_is_closed(port: int, said: bytes) -> None:
    assert await answer(await connected(port, said)) == b""


async def test_the_second_request_of_a_connection_has_to_come_too(port: int) -> None:
    reader, writer = await connected(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200") and await reader.readexactly(1) == b"2"
    await asyncio.sleep(2 * PATIENCE)  # between requests uvicorn's own patience counts
    writer.write(b"POST / HTTP/1.1\r\n")
    assert await answer((reader, writer)) == b""


async def test_endless_headers_are_cut_off(port: int) -> None:
    stream = await connected(port, b"POST / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 200_000)
    said = await answer(stream)
    assert said == b"reset" or said.startswith(b"HTTP/1.1 400")  # nothing, if it were patience that ended


async def test_a_body_that_does_not_come_is_408(port: int) -> None:
    said = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\nab"
    slow = await connected(port, said)
    assert (await answer(slow)).startswith(b"HTTP/1.1 408")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.post("/", content=b"x" * 900)).json() == 900  # what the slow one held is free


async def test_an_answer_has_to_be_taken(port: int) -> None:
    said = b"POST /?long=40000000 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
    deaf = socket.create_connection(("127.0.0.1", port))
    deaf.sendall(said)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await asyncio.sleep(PATIENCE)
        assert (await client.post("/", content=b"x")).status_code == 429  # the answer takes all there is

        async def taken() -> bool:
            return (await client.post("/", content=b"x")).status_code == 200

        await until(taken)
    deaf.close()


async def test_bodies_of_all_requests_are_bounded_together(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        held = asyncio.create_task(client.post("/?wait=1", content=b"x" * 600))
        await asyncio.sleep(0.3)
        refused = await client.post("/", content=b"x" * 600)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert (await client.post("/", content=b"x" * 300)).json() == 300
        assert (await held).json() == 600
        assert (await client.post("/", content=b"x" * 600)).json() == 600
