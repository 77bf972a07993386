"""Bounds on what one client can cost a server: connections; time for headers, bodies and answers; bytes by address.

A body costs only the bytes that have arrived, so a large declared length costs nobody anything. A body has to come at a
minimum rate. Only so many bodies of one address may be on their way for longer than a moment: the oldest gives way to
a new one. One address may have as many of a server's bytes as are still free, so that another address always finds room
(dynamic thresholds; Choudhury and Hahne 1998). The same holds of connections, which are descriptors of the process: a
connection that asks nothing gives way to a new one.

`sandbox/client_bounds.py` and `agentrl/system/client_bounds.py` are the same file: neither side imports the other.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

logger = logging.getLogger(__name__)
ACCEPTED_AT_ONCE = 64
"""uvicorn's `backlog`: connections that are accepted in one round of the event loop, before bounds apply to them."""
QUEUE = 4096
"""Connections that wait to be accepted."""
HEADER_SECONDS = 30.0
"""Seconds from the first byte of a request, or the connection's start, to the end of its headers."""
MAX_HEADERS = 64 << 10
"""Bytes of a request before its body."""
BODY_SECONDS = 30.0
"""Seconds that a body has to come, at the longest."""
BODY_PATIENCE = 10.0
"""Seconds by which a body may lag SLOWEST."""
SLOWEST = 16 << 10
"""Bytes of a body that have to come a second."""
HALF_SENT = 1024
"""Bodies of one address that may be on their way for longer than FRESH seconds. Each is a connection that waits; ended
sooner, clients come again at once, which costs the server more than their waiting.
"""
FRESH = 5.0
"""Seconds within which a body sent at once has arrived and been read, by a busy server, too."""
ANSWER_SECONDS = 60.0
"""Seconds that a client has to read an answer."""


def address(scope: Scope) -> str:
    """Return the address that a request came from."""
    return scope["client"][0] if scope.get("client") else ""


def too_large(scope: Scope) -> str:
    """Describe the fault of a request whose bytes before the body are more than MAX_HEADERS; else return nothing."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    target = len(scope["method"]) + len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
    size = target + sum(len(name) + len(value) + 4 for name, value in headers)
    return (
        f"the headers must have at most {MAX_HEADERS:,} bytes together, and have {size:,}" if size > MAX_HEADERS else ""
    )


class Bodies:
    """Bodies on their way to a server, and the bytes that it holds, by client."""

    def __init__(self, most: int) -> None:
        """`most`: bytes that all clients hold together."""
        self.most = most
        self.total = 0
        """Bytes held now."""
        self._held: Counter[str] = Counter()
        self._coming: dict[str, dict[Body, None]] = {}
        """Bodies by address, oldest first."""

    def room(self, client: str) -> int:
        """Bytes that a client may have more: then it has as many as are free."""
        return (self.most - self.total - self._held[client]) // 2

    def hold(self, client: str, size: int) -> None:
        """Count `size` bytes more, or less, for a client."""
        self.total += size
        self._held[client] += size
        if not self._held[client]:
            del self._held[client]

    def begin(self, client: str, size: int | None) -> Body:
        """Take up the body of a request, of `size` bytes where that is known. Its `end` has to be called."""
        body = Body(self, client, asyncio.get_running_loop().time())
        body.complete = size == 0
        if body.complete:
            return body
        ours = self._coming.setdefault(client, {})
        ours[body] = None
        while len(ours) > HALF_SENT and (oldest := next(iter(ours))).begun < body.begun - FRESH:
            oldest.give_way()
        return body

    def arrived(self, body: Body) -> None:
        """Forget a body that is no longer on its way; what it holds stays counted."""
        ours = self._coming.get(body.client, {})
        ours.pop(body, None)
        if not ours:
            self._coming.pop(body.client, None)


class Body:
    """Body of one request, and the bytes that are held for it."""

    def __init__(self, bodies: Bodies, client: str, begun: float) -> None:
        self.client, self.begun = client, begun
        self.taken = 0
        """Bytes that have come."""
        self.complete = False
        """Nothing more will come."""
        self._bodies, self._held = bodies, 0
        self._gave_way = False
        self._waiting: asyncio.Timeout | None = None

    @property
    def deadline(self) -> float:
        """Time, by the loop's clock, at which more has to have come."""
        return self.begun + min(BODY_SECONDS, BODY_PATIENCE + self.taken / SLOWEST)

    async def receive(self, receive: Receive) -> Message:
        """Return the next message of the request. Raises HTTPException: 408, too slow; 429, no room for it."""
        if self.complete:
            return await receive()
        try:
            async with asyncio.timeout_at(0.0 if self._gave_way else self.deadline) as self._waiting:
                message = await receive()
        except TimeoutError:
            if self._gave_way:
                detail = "more requests of this address were on their way than are waited for, this one longest"
                raise HTTPException(429, detail, {"Retry-After": "1"}) from None
            raise HTTPException(408, "the body did not come in time") from None
        finally:
            self._waiting = None
        size = len(message.get("body", b""))
        if size > self._bodies.room(self.client):
            raise HTTPException(429, "the requests of this address hold too much", {"Retry-After": "1"})
        self.taken += size
        self.hold(size)
        if message["type"] != "http.request" or not message.get("more_body"):
            self.complete = True
            self._bodies.arrived(self)
        return message

    def hold(self, size: int) -> None:
        """Count `size` bytes more until the end."""
        self._held += size
        self._bodies.hold(self.client, size)

    def give_way(self) -> None:
        """End the wait for more of it."""
        self._gave_way = True
        self._bodies.arrived(self)
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(0.0)

    def end(self) -> None:
        """Give back the bytes that are held for the body."""
        self._bodies.arrived(self)
        self._bodies.hold(self.client, -self._held)
        self._held = 0


def most_connections() -> int:
    """Return three quarters of the descriptors that this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


class Connections:
    """Connections of a server, by address: at most `most_connections()`, and of one address as many as are still
    free."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._total = 0
        self._idle: dict[str, dict[Patient, None]] = {}
        """By address the connections without a request under way; one that has asked nothing before one that has."""
        self._warned = False

    def add(self, connection: Patient) -> None:
        """Admit a new connection. Without room for it, the address's idle one that is first in line ends, else it."""
        client = connection.address
        self._total += 1
        self._open[client] = self._open.get(client, 0) + 1
        if self._open[client] + self._total > most_connections():
            line = self._idle.get(client, {})
            ending = next((one for one in line if not one.has_asked), next(iter(line), connection))
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%d connections are open, %d of %s: idle ones end for new ones. The bound is 3/4 of this process's "
                    "limit of open files (ulimit -n)",
                    *(self._total, self._open[client], client or "one address"),
                )
            self.busy(ending)
            ending.transport.abort()
            if ending is connection:
                return
        self.idle(connection)

    def idle(self, connection: Patient) -> None:
        """Note that a connection waits for a request."""
        self._idle.setdefault(connection.address, {})[connection] = None

    def busy(self, connection: Patient) -> None:
        """Note that a connection has a request, or ends."""
        line = self._idle.get(connection.address, {})
        line.pop(connection, None)
        if not line:
            self._idle.pop(connection.address, None)

    def remove(self, connection: Patient) -> None:
        """Forget a connection that has ended."""
        self.busy(connection)
        self._total -= 1
        self._open[connection.address] -= 1
        if not self._open[connection.address]:
            del self._open[connection.address]


class Listener(socket.socket):
    """Listening socket with a long queue, whatever number of connections is accepted at once."""

    def listen(self, backlog: int = QUEUE, /) -> None:
        super().listen(QUEUE)


class _Cycle(Protocol):
    response_complete: bool
    disconnected: bool
    message_event: asyncio.Event


class Patient(asyncio.Protocol):
    """Part of a uvicorn protocol: closes a connection for which there is no room, whose request does not begin in time,
    or whose client does not take its answer.
    """

    connections_of_all: Connections
    """Connections of the server: each has a class of its own."""
    address = ""
    has_asked = False
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: _Cycle | None
    _timer: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _in_head = False
    """httptools alone: a request's head has begun and not ended."""

    @property
    def is_under_way(self) -> bool:
        """True between the headers of a request and the end of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def has_part_of_a_head(self) -> bool:
        """True where the parser, h11's or httptools', waits for the rest of a request's head."""
        h11 = getattr(self, "conn", None)
        return bool(h11.trailing_data[0]) if h11 is not None else self._in_head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._start_timer()
        self.connections_of_all.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_under_way:
            self._stop_timer()
            self.has_asked = True
            self.connections_of_all.busy(self)
        elif self._timer is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        """Note that a head has begun, for httptools."""
        self._in_head = True
        super().on_message_begin()  # type: ignore[misc]  # uvicorn's

    def on_headers_complete(self) -> None:
        """Note that a head has ended, for httptools."""
        self._in_head = False
        super().on_headers_complete()  # type: ignore[misc]  # uvicorn's

    def on_response_complete(self) -> None:
        """Bound the next request's head, too: part of it may have come before the answer was sent."""
        super().on_response_complete()  # type: ignore[misc]  # uvicorn's
        if not self.is_under_way and not self.transport.is_closing():
            self.connections_of_all.idle(self)
        if self._timer is None and self.has_part_of_a_head and not self.is_under_way:
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP. In the body of a request under way, the app's own answer goes nowhere."""
        under_way = self.cycle if self.is_under_way else None
        super().send_400_response(msg)  # type: ignore[misc]  # uvicorn's
        if under_way is not None:
            under_way.disconnected = True
            under_way.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_sending()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_of_all.remove(self)
        self._stop_timer()
        self._stop_sending()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self._out_of_patience)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _out_of_patience(self) -> None:
        self._timer = None
        self.transport.close()
