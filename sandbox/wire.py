"""How server, zygote and supervisor talk: a JSON header, then raw blobs, over a UNIX socket.

Nothing here comes from the program that runs, save the blobs of fetched files: the supervisor alone speaks on its
socket.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("!IQ")


def pack(header: dict[str, Any], blobs: list[bytes]) -> bytes:
    encoded = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    body = sum(len(blob) for blob in blobs)
    return b"".join([_LENGTHS.pack(len(encoded), body), encoded, *blobs])


def _split(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    blobs, start = [], 0
    for size in header.pop("sizes"):
        blobs.append(body[start : start + size])
        start += size
    return header, blobs


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Read one message, blocking. Raises EOFError when the other side is gone."""
    length, body = _LENGTHS.unpack(_read(sock, _LENGTHS.size))
    header = json.loads(_read(sock, length))
    return _split(header, _read(sock, body))


def _read(sock: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        got = sock.recv_into(view[done:], size - done)
        if not got:
            raise EOFError("the other side is gone")
        done += got
    return bytes(buffer)


async def receive_async(sock: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """`receive` on a non-blocking socket."""
    length, body = _LENGTHS.unpack(await _read_async(sock, _LENGTHS.size))
    header = json.loads(await _read_async(sock, length))
    return _split(header, await _read_async(sock, body))


async def _read_async(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        got = await loop.sock_recv_into(sock, view[done:])
        if not got:
            raise EOFError("the other side is gone")
        done += got
    return bytes(buffer)
