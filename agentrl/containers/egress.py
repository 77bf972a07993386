"""Way out of a container for the hosts that a config lists: a proxy that knows CONNECT alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Collection

HTTPS = 443
HEAD_SECONDS, CONNECT_SECONDS = 30.0, 30.0
MOST_CONNECTIONS = 64
"""Connections of one container."""
PIECE = 64 << 10


def host_and_port(text: str) -> tuple[str, int]:
    """Read `host` or `host:port`; without a port it is the port of HTTPS. Raises ValueError."""
    host, colon, port = text.lower().rpartition(":")
    if not colon:
        return text.lower(), HTTPS
    if not host or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is no host:port")
    return host, int(port)


@contextlib.asynccontextmanager
async def way_out(listener: socket.socket, hosts: Collection[str]) -> AsyncIterator[None]:
    """Answer a container's connections at `listener`: those to `hosts` are passed on."""
    allowed = frozenset(map(host_and_port, hosts))
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            if len(tasks) <= MOST_CONNECTIONS:
                await _pass_on(reader, writer, allowed)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(connected, sock=listener, limit=PIECE)
    try:
        yield
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allowed: Collection[tuple[str, int]]
) -> None:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_SECONDS)
    method, target, *_ = (*head.split(b"\r\n")[0].decode("latin-1").split(" "), "", "")
    if method != "CONNECT" or host_and_port(target) not in allowed:
        said = b"this container reaches the hosts of container.network alone, by CONNECT (https)\n"
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(said) + said)
        await writer.drain()
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 1.0)
        return
    out_reader, out_writer = await asyncio.wait_for(asyncio.open_connection(*host_and_port(target)), CONNECT_SECONDS)
    try:
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_copy(reader, out_writer), _copy(out_reader, writer))
    finally:
        out_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
