"""Delivery of an HTTP answer: did its client take it from the socket, as far as TCP knows?

A connection that ends while bytes of the answer are unread is reset by the client's system, and a client that has read
all of them ends it in order. The client's program may have read bytes without using them; this stays unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Protocol, cast

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

CONNECTION = "agentrl.connection"
"""Key of a request's state for its connection."""


class _Cycle(Protocol):
    disconnected: bool
    response_complete: bool


class Delivery:
    """One answer on its way."""

    def __init__(self, connection: Watched) -> None:
        self._connection: Watched | None = connection
        self._whole = False
        self._written = self._tokens = self._before = 0
        self._marks: deque[tuple[int, int]] = deque()
        """(bytes that were written, tokens that they stand for) of pieces that the client's system may not have."""

    @property
    def whole(self) -> bool:
        """True where all of it was sent, and nothing says that the client left some of it unread."""
        return self._whole if self._connection is None else self._connection.is_taken()

    @property
    def is_under_way(self) -> bool:
        """True where more of it may reach the client."""
        return self._connection is not None and not self._connection.is_taken()

    @property
    def tokens(self) -> int:
        """Number of the answer's tokens whose text the client is known to have been given.

        Where the client left bytes unread, the last piece that its system took is not counted: the last of its bytes
        was among them.
        """
        if self._connection is None:
            return self._tokens
        self._look(self._connection.unread())
        return self._before if self._connection.is_reset() else self._tokens

    def sent(self, size: int, tokens: int) -> None:
        """Note that `size` bytes of the body were written; all of it by now stands for the first `tokens` tokens."""
        if self._connection is None:
            return
        self._written += size
        self._marks.append((self._written, tokens))
        self._look(self._connection.unread())

    def _look(self, unread: int | None) -> None:
        """Note the bytes that the client has. `unread`: number of the last bytes that it may lack; None: unknown.

        They are more than is counted here, which leaves out the frame around each piece.
        """
        while unread is not None and self._marks and self._written - self._marks[0][0] >= unread:
            self._before, self._tokens = self._tokens, self._marks.popleft()[1]

    def end(self, whole: bool, unread: int | None, *, was_read: bool) -> None:
        """Settle it for good. `was_read`: the client left no byte unread that its system had taken."""
        self._look(unread)
        if not was_read:
            self._tokens = self._before
        self._connection, self._whole = None, whole


class Watched(asyncio.Protocol):
    """Part of a uvicorn protocol: follows the answer to a request. See `watched`."""

    transport: asyncio.Transport
    cycle: _Cycle | None
    app_state: dict[str, object]
    _delivery: Delivery | None = None
    _is_held = False
    """This process held bytes for the client when it last looked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION: self}

    def watch(self) -> Delivery:
        """Follow the answer to the current request."""
        self._settle(True)  # The answer before, of a client that asked before it had read it.
        delivery = Delivery(self)
        if self.cycle is not None and self.cycle.disconnected:  # Nothing would settle the answer any more.
            delivery.end(False, None, was_read=False)
        else:
            self._delivery = delivery
        return delivery

    def is_taken(self) -> bool:
        """Check whether the last answer was sent and no byte of it is known to be unread."""
        if self.cycle is None or not self.cycle.response_complete or self.transport.get_write_buffer_size():
            return False
        link = self._link
        (unread,) = struct.unpack("i", ioctl(link.fileno(), TIOCOUTQ, b"\0" * 4))
        return not unread and not link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def unread(self) -> int | None:
        """Count the bytes that were written and that the client's system has not acknowledged; None: unknown."""
        held = self.transport.get_write_buffer_size()
        try:
            (unread,) = struct.unpack("i", ioctl(self._link.fileno(), TIOCOUTQ, b"\0" * 4))
        except OSError:  # of a connection that has ended
            return None
        self._is_held = bool(held)
        return int(unread) + held

    def is_reset(self) -> bool:
        """Check whether the connection has ended by a reset."""
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLERR)
        return any(found & select.POLLERR for _, found in poll.poll(0))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Have the system send at once all bytes that are written meanwhile."""
        self._cork(1)
        try:
            yield
        finally:
            self._cork(0)

    def _cork(self, is_set: int) -> None:
        with contextlib.suppress(OSError):  # of a connection that has ended
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, is_set)

    @property
    def _link(self) -> socket.socket:
        return cast(socket.socket, self.transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            self._settle(True)  # A client asks again on this connection when it has read the answer before.
        super().data_received(data)

    def eof_received(self) -> bool | None:
        self._settle(self.is_taken())
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        # Where this side ends the connection, nothing is heard of what is still on its way.
        sent = self.cycle is not None and self.cycle.response_complete
        # The bytes that this process still held are gone, and with them their number.
        is_known = not self._is_held
        self._settle(sent and exc is None, is_known=is_known, was_read=exc is None)
        super().connection_lost(exc)

    def _settle(self, whole: bool, *, is_known: bool = True, was_read: bool = True) -> None:
        if self._delivery is not None:
            self._delivery.end(whole, self.unread() if is_known else None, was_read=was_read)
            self._delivery = None


def watched(scope: Scope) -> Delivery:
    """Follow the answer to a request, which came by a `Watched` protocol."""
    return _connection(scope).watch()


def _connection(scope: Scope) -> Watched:
    connection: Watched = scope["state"][CONNECTION]
    return connection


class Last(bytes):
    """The last piece of a stream."""


class WholeStream(StreamingResponse):
    """Stream by a `Watched` protocol whose `Last` piece and end arrive together.

    A client that leaves as soon as it has read the last event has then taken all of it.
    """

    body_iterator: AsyncIterator[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            with contextlib.ExitStack() as stack:
                if message.get("body") and not message.get("more_body"):
                    stack.enter_context(_connection(scope).together())
                await send(message)

        await super().__call__(scope, receive, sent)

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self.body_iterator:
            more = not isinstance(piece, Last)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            if not more:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
