"""Bounds on the bytes that a client can send to a server, however they are framed.

Two parts. `BodyLimit` refuses, in the server's own words, a body that is too long or whose length is unclear. `metered`
bounds what never becomes a body: headers, extensions of chunks, trailers. `sandbox.gate` does the same for a server
that imports nothing of this package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEADERS = 64 << 10
"""Bytes of a request before its body, as h11 bounds them too; one read from the socket comes on top."""


class BodyLimit:
    """ASGI middleware that refuses a request of unclear length (400) or with more than `most` bytes (413).

    A refusal ends the connection; so does any answer that is sent before the whole body has come, because nobody reads
    the rest.
    """

    def __init__(self, app: ASGIApp, most: int, refusal: Callable[[int, str], Response]) -> None:
        """`refusal(status, detail)` makes the answer to a request that the app does not see."""
        self.app, self.most, self.refusal = app, most, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared, problem = body_length(scope)
        complete, taken = declared == 0, 0

        async def received() -> Message:
            nonlocal complete, taken
            message = await receive()
            if message["type"] == "http.request":
                complete = not message.get("more_body")
                taken += len(message.get("body", b""))
                if taken > self.most:
                    raise HTTPException(413, self._too_large)
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and not complete:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if problem:
            await self.refusal(400, problem)(scope, receive, sent)
        elif declared is not None and declared > self.most:
            await self.refusal(413, self._too_large)(scope, receive, sent)
        else:
            await self.app(scope, received, sent)

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
    few bytes can make of its body.
    """

    class Metered(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
        _taken = 0

        def data_received(self, data: bytes) -> None:
            self._taken += len(data)
            super().data_received(data)
            under_way = self.cycle is not None and not self.cycle.response_complete
            if self._taken > MAX_HEADERS + under_way * 2 * most:
                self.transport.close()

        def on_response_complete(self) -> None:
            self._taken = 0
            super().on_response_complete()

    return Metered
