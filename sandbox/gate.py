"""What a client can cost the server: headers, bodies and the taking of answers are bounded in time and
size, and so is the sum of what is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BODY = 96 << 20
MAX_BODIES = 1 << 30
"""Bytes of all requests under way and their answers."""
BODY_SECONDS = 60.0
ANSWER_SECONDS = 60.0
"""That a client has to read an answer."""
HEADER_SECONDS = 30.0
"""From the first byte of a request, or the connection's start, to the end of its headers. uvicorn's h11 bounds their
size.
"""
ARRIVED = "sandbox.arrived"
"""Key of the scope: when a request's headers were there, by the loop's clock."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gate:
    """ASGI: refuses bodies that are larger than `MAX_BODY`, or do not say how large they are, before they are read;
    those that take too long; and those for which there is no memory left.

    An answer that is sent before all of the body has come ends the connection: nobody reads the rest.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.bodies = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[ARRIVED] = asyncio.get_running_loop().time()
        size, refusal = self._admitted(scope)
        body = _Body(receive, size, scope[ARRIVED] + BODY_SECONDS)
        held = size

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and body.left:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            if answer := message.get("body"):
                self.bodies += len(answer)
                held += len(answer)
                await send({**message, "more_body": True})
                message = {**message, "body": b""}  # sent once the client has taken what is before it
            await send(message)

        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self.bodies += size
        try:
            await self.app(scope, body.receive, sent)
        finally:
            self.bodies -= held

    def _admitted(self, scope: MutableMapping[str, Any]) -> tuple[int, JSONResponse | None]:
        """Bytes of the body, or why it may not come. Its length has to be said once, and in one way: of a request with
        two lengths nobody knows where it ends.
        """
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
            if lengths:
                return 0, _refuse(400, "the body must have a Content-Length or a Transfer-Encoding, and not both")
            return 0, _refuse(411, "the body must have a Content-Length")
        if not lengths:
            detail = f"the body must have a Content-Length of at most {MAX_BODY} bytes"
            return 0, _refuse(411, detail) if scope["method"] == "POST" else None
        size = int(lengths[0]) if len(lengths) == 1 and lengths[0].isdigit() and len(lengths[0]) < 20 else MAX_BODY + 1
        if size > MAX_BODY:
            return 0, _refuse(413, f"the body must have a Content-Length of at most {MAX_BODY} bytes")
        if self.bodies + size > MAX_BODIES:
            detail = f"the requests under way hold {self.bodies} of {MAX_BODIES} bytes"
            return 0, _refuse(429, detail, {"Retry-After": "1"})
        return size, None


def _refuse(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The body is not read: the connection ends."""
    return JSONResponse({"detail": detail}, status, {"Connection": "close", **(headers or {})})


class _Body:
    """A request's body on its way. `left`: bytes that have not come yet."""

    def __init__(self, receive: Receive, size: int, deadline: float) -> None:
        self._receive, self.left, self._deadline = receive, size, deadline

    async def receive(self) -> MutableMapping[str, Any]:
        """Raises 408 when the body is not there at the deadline."""
        if not self.left:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time") from None
        self.left -= len(message.get("body", b""))
        return message


class PatientProtocol(H11Protocol):
    """Closes a connection whose next request does not begin in time, or whose client does not take its answer."""

    _timer: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEADER_SECONDS, self._out_of_patience)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._out_of_patience)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._sending is not None:
            self._sending.cancel()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _out_of_patience(self) -> None:
        self._timer = None
        self.transport.close()
