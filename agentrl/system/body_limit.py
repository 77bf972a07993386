"""A bound on the bytes of a request's body, for any framing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: a body of unclear length gives 400, and one of more than `most` bytes 413.

    A refusal ends the connection. So does an answer that is sent before the whole body has come: nobody reads the rest.
    """

    def __init__(self, app: ASGIApp, most: int, refusal: Callable[[int, str], ASGIApp]) -> None:
        """`refusal(status, detail)` makes the answer to a request that the app does not see."""
        self.app, self.most, self.refusal = app, most, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared, unclear = body_length(scope)
        too_large = f"expected a request of at most {self.most:,} bytes, found more"
        taken, complete = 0, declared == 0

        async def received() -> Message:
            nonlocal taken, complete
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most:
                raise HTTPException(413, too_large)
            complete = complete or not message.get("more_body")
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and not complete:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        app = self.app
        if unclear:
            app = self.refusal(400, unclear)
        elif declared is not None and declared > self.most:
            app = self.refusal(413, too_large)
        # A client that left before its body had come: nobody waits for an answer, and nothing is wrong here.
        with contextlib.suppress(ClientDisconnect):
            await app(scope, received, sent)


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
