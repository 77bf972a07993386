"""Bounds on the bytes that a client can send to a server, for any framing and any pace.

Two parts. `BodyLimit` refuses, in the server's own words, headers and bodies that are too long and bodies of unclear
length. It also refuses bodies that do not come in time or find no room (`client_bounds`). `metered` bounds bytes that
never become a body: extensions of chunks, trailers, requests that do not begin. `sandbox.gate` does the same for a
server that imports nothing of this package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agentrl.system.client_bounds import MAX_HEADERS, Bodies, Patient, address, too_large

MAX_BODIES = 1 << 30
"""Bytes of all bodies on their way to a server together."""


class BodyLimit:
    """ASGI middleware that refuses requests by their body and headers.

    Unclear length gives 400, more than `most` bytes 413, too large headers 431, a late body 408, lack of room 429.

    A refusal ends the connection; so does any answer that is sent before the whole body has come, because nobody reads
    the rest.
    """

    def __init__(self, app: ASGIApp, most: int, refusal: Callable[[int, str], Response]) -> None:
        """`refusal(status, detail)` makes the answer to a request that the app does not see."""
        self.app, self.most, self.refusal = app, most, refusal
        self._bodies = Bodies(MAX_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared, problem = self._judged(scope)
        body = self._bodies.begin(address(scope), declared)

        async def received() -> Message:
            message = await body.receive(receive)
            if body.taken > self.most:
                raise HTTPException(413, self._too_large)
            if body.complete:
                body.end()  # bytes held from here on are the app's own
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.complete:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            app = self.refusal(*problem) if problem else self.app
            await app(scope, received, sent)
        except ClientDisconnect:
            pass  # the client left before its body had come: nobody waits for an answer, and nothing is wrong here
        finally:
            body.end()

    def _judged(self, scope: Scope) -> tuple[int | None, tuple[int, str] | None]:
        """Return the declared length of the body (None: unknown), and status and reason of a refusal."""
        declared, unclear = body_length(scope)
        if large := too_large(scope):
            return declared, (431, large)
        if unclear:
            return declared, (400, unclear)
        if declared is not None and declared > self.most:
            return declared, (413, self._too_large)
        return declared, None

    @property
    def _too_large(self) -> str:
        return f"expected a request of at most {self.most:,} bytes, found more"


def body_length(scope: Scope) -> tuple[int | None, str]:
    """Return the bytes of a request's body (None: chunked, or unclear) and the problem with its framing (RFC 9112,
    6.3)."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    codings = [value.strip().lower() for name, value in scope["headers"] if name == b"transfer-encoding"]
    if codings and (lengths or codings != [b"chunked"] or scope["http_version"] == "1.0"):
        return None, "expected a Content-Length, or Transfer-Encoding: chunked, and not both; HTTP/1.0 has no chunks"
    if codings:
        return None, ""
    if len(lengths) > 1 or not all(length.isdigit() and len(length) < 20 for length in lengths):
        return None, "expected one Content-Length, a number"
    return int(lengths[0]) if lengths else 0, ""


def metered(most: int) -> type[asyncio.Protocol]:
    """Make the protocol for `uvicorn.Config(http=...)` of a server whose bodies have `most` bytes at most.

    It closes a connection that has sent more than MAX_HEADERS without a request, or for one request more than chunks of
    few bytes can make of its body. It also closes the connections that `Patient` closes.
    """

    class Metered(Patient, AutoHTTPProtocol):  # type: ignore[valid-type,misc]
        _taken = 0

        def data_received(self, data: bytes) -> None:
            self._taken += len(data)
            super().data_received(data)
            if self._taken > MAX_HEADERS + self.is_under_way * 2 * most:
                self.transport.close()

        def on_response_complete(self) -> None:
            self._taken = 0
            super().on_response_complete()

    return Metered
