"""What a client can send to a server of ours: a bounded number of bytes, however they are framed.

Two parts. `BodyLimit` refuses, in the server's own words, what HTTP lets a client say of its body and what is longer
than it may be. `metered` bounds what never becomes a body: headers, extensions of chunks, trailers. `sandbox.gate` does
the same for a server that imports nothing of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import Response
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEADERS = 64 << 10
"""Bytes of a request before its body, as h11 bounds them too; what the system hands over at once comes on top."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class BodyLimit:
    """ASGI: refuses a request of unclear length (400) or with more than `most` bytes (413), and ends its connection.

    An answer that is sent before all of the body has come ends the connection, too: nobody reads the rest.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], most: int, refusal: Callable[[int, str], Response]) -> None:
        """`refusal(status, detail)` is the answer to what the app does not see."""
        self.app, self.most, self.refusal = app, most, refusal

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
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


def body_length(scope: Message) -> tuple[int | None, str]:
    """Bytes of the body (None: chunked, or not to be told), and what is wrong with its framing (RFC 9112, 6.3)."""
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
    """The protocol for `uvicorn.Config(http=...)` of a server whose bodies have `most` bytes at most.

    It ends a connection that has sent more than MAX_HEADERS without a request, or for one request more than chunks of
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
