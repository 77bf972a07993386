"""Requests framed in every way that a client may think of, as bytes on a socket, each with a body that does not end."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FLOOD = 96 << 20
"""Bytes after which a server that still reads has been caught."""
_BUFFERED = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2]) + (4 << 20)
"""That systems take on both sides without the server's reading them."""
_CHUNK = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
_PIECE = b"x" * 0x8000


@dataclass(frozen=True, slots=True)
class Framing:
    name: str
    head: bytes
    """After the request line and Host."""
    body: bytes
    """Sent again and again."""
    version: bytes = b"1.1"
    before: bytes = b""
    """Of the body, once."""
    statuses: frozenset[int] = frozenset({400})

    @property
    def is_plain(self) -> bool:
        """Its headers alone say that it has to be refused."""
        return self.name.startswith(("both", "b'", "length"))


def framings(most: int) -> Iterator[Framing]:
    """For a server that takes bodies of `most` bytes."""
    chunked, endless = frozenset({411, 413}), frozenset({400, 411, 413, 431})
    both = [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"]
    for place, lines in enumerate(itertools.permutations([*both, b"X-A: b\r\n"])):
        yield Framing(f"both {place}", b"".join(lines), _CHUNK)
    for coding in (b"Chunked", b"identity", b"gzip, chunked", b"chunked, chunked", b"xchunked", b"chunked, identity"):
        for length in (b"", b"Content-Length: 5\r\n"):
            if coding != b"Chunked" or length:
                yield Framing(f"{coding!r} {length!r}", b"Transfer-Encoding: %b\r\n%b" % (coding, length), _CHUNK)
    for length in (b"5, 6", b"+5", b"-5", b"0x10", b"5 5", b"", b"\xd9\xa5", b"1e3", b"5\r\nContent-Length: 6"):
        yield Framing(f"length {length!r}", b"Content-Length: %b\r\n" % length, _PIECE, statuses=frozenset({400, 411}))
    for size in (most + 1, 1 << 40, 1 << 64, 10**30):
        too_large = frozenset({400, 413})  # 400: more than the parser's integers hold
        yield Framing(f"length {size}", b"Content-Length: %d\r\n" % size, _PIECE, statuses=too_large)
    yield Framing("chunks", both[1], _CHUNK, statuses=chunked)
    yield Framing("a large chunk", both[1], _PIECE, before=b"%x\r\n" % (1 << 40), statuses=chunked)
    yield Framing("an endless extension", both[1], _PIECE, before=b"5;", statuses=endless)
    yield Framing("extensions", both[1], b"1;" + b"a" * 1000 + b"\r\nx\r\n", statuses=endless)
    yield Framing("trailers", both[1], b"X-A: " + b"b" * 1000 + b"\r\n", before=b"0\r\n", statuses=endless)
    yield Framing("an endless header", b"X-A: ", _PIECE, statuses=endless)
    yield Framing("headers", b"", b"X-A: " + b"b" * 1000 + b"\r\n", statuses=endless)
    for version in (b"1.0", b"1.1"):
        statuses = frozenset({400, 411, 422})
        yield Framing(f"no length {version!r}", b"", _PIECE, version, statuses=statuses)
    yield Framing("chunks 1.0", both[1], _CHUNK, b"1.0", statuses=frozenset({400, 411}))
    yield Framing("both 1.0", b"".join(both), _CHUNK, b"1.0")


def offer(port: int, framing: Framing, target: bytes, method: bytes = b"POST", most: int = FLOOD) -> tuple[int, int]:
    """The status that the server answers (0: it closes the connection without one), and the bytes that it took before
    that. About `most` are sent, with no end to the body.
    """
    ended = b"" if framing.name in ("an endless header", "headers") else b"\r\n"
    head = b"%b %b HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\n" % (method, target, framing.version)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        client.settimeout(20)
        client.connect(("127.0.0.1", port))
        sent, data = 0, head + framing.head + ended + framing.before
        try:
            while sent < most:
                client.sendall(data)
                sent += len(data)
                data = framing.body * max(1, (1 << 16) // len(framing.body))
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while sent < FLOOD and (part := client.recv(1 << 16)):
                answer += part
        except ConnectionResetError:
            pass
    return int(answer.split(b" ", 2)[1]) if answer else 0, sent


def check(port: int, most: int, target: bytes) -> None:
    """Every framing is refused, and none of them makes the server read more than `most` bytes and what is buffered;
    nor does one whose request the server answers without its body.
    """

    def one(framing: Framing, target: bytes, method: bytes) -> str | None:
        status, taken = offer(port, framing, target, method)
        right = framing.statuses if (method, target) == asked else {*framing.statuses, 200, 404, 405}
        if status in {0, *right} and taken <= most + _BUFFERED:
            return None
        return f"{method!r} {target!r} {framing.name}: {status} after {taken} bytes"

    asked = (b"POST", target)
    every = list(framings(most))
    plain = [framing for framing in every if framing.is_plain]
    endless = [framing for framing in every if framing.name in ("chunks", "a large chunk", f"length {most + 1}")]
    offers = [(framing, target, b"POST") for framing in every]
    offers += [(framing, b"/nowhere", b"POST") for framing in endless]
    offers += [(framing, path, b"GET") for framing in endless for path in (target, b"/health")]
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda framing: (framing, *offer(port, framing, target, most=1)), plain)
        unsaid = [(framing.name, status) for framing, status, _ in answers if status not in framing.statuses]
        assert not unsaid
        fallen = [fault for fault in threads.map(lambda asked: one(*asked), offers) if fault]
    assert not fallen, "\n".join(fallen)
