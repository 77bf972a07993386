"""Bounds on what a client can cost the server: headers, bodies and the taking of answers are bounded in time and
size, and so is the sum of what is on its way.
"""

from __future__ import annotations

import asyncio

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sandbox.client_bounds import Bodies, Connections, Patient, address, too_large

MAX_BODY = 96 << 20
MAX_BODIES = 1 << 30
"""Bytes of all requests under way and their answers."""
ARRIVED = "sandbox.arrived"
"""Key of the scope for the time at which a request's headers were there, in seconds of the loop's clock."""


class Gate:
    """ASGI: refuses headers that are too long; bodies that are larger than `MAX_BODY`, or do not say how large they
    are, before they are read; those that come too slowly; and those for which there is no memory left.

    An answer that is sent before all of the body has come ends the connection: nobody reads the rest.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.bodies = Bodies(MAX_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[ARRIVED] = asyncio.get_running_loop().time()
        size, refusal = self._admitted(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        body = self.bodies.begin(address(scope), size)

        async def received() -> Message:
            return await body.receive(receive)

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.complete:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            if answer := message.get("body"):
                body.hold(len(answer))
                await send({**message, "more_body": True})
                message = {**message, "body": b""}  # sent once the client has taken what is before it
            await send(message)

        try:
            await self.app(scope, received, sent)
        finally:
            body.end()

    def _admitted(self, scope: Scope) -> tuple[int, JSONResponse | None]:
        """Bytes of the body, or why it may not come. Its length has to be said once, and in one way: of a request with
        two lengths nobody knows where it ends.
        """
        if large := too_large(scope):
            return 0, _refuse(431, large)
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
        if size > self.bodies.room(address(scope)):
            detail = f"the requests under way hold {self.bodies.total} of {MAX_BODIES} bytes"
            return 0, _refuse(429, detail, {"Retry-After": "1"})
        return size, None


def _refuse(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The body is not read: the connection ends."""
    return JSONResponse({"detail": detail}, status, {"Connection": "close", **(headers or {})})


class PatientProtocol(Patient, H11Protocol):  # type: ignore[misc]
    """The server's protocol."""

    connections_of_all = Connections()
