"""Front of every HTTP server of agentrl: bounds on what a client costs it (`agentrl.system.client_bounds`).

`Paced` refuses headers that are too long, and bodies that do not come in time or find no room. `metered` bounds
connections, and bytes that never become a body: extensions of chunks, trailers, requests that do not begin.
`sandbox.gate` does the same for a server that keeps bodies and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agentrl.system.body_limit import BodyLimit, body_length
from agentrl.system.client_bounds import MAX_HEADERS, Bodies, Connections, Patient, address, too_large

MAX_BODIES = 1 << 30
"""Bytes of all bodies on their way to a server together."""


class Paced:
    """ASGI middleware, within `BodyLimit`: too large headers give 431, a late body 408, lack of room for it 429."""

    def __init__(self, app: ASGIApp, refusal: Callable[[int, str], ASGIApp]) -> None:
        """`refusal(status, detail)` makes the answer to a request that the app does not see."""
        self.app, self.refusal = app, refusal
        self._bodies = Bodies(MAX_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if large := too_large(scope):
            await self.refusal(431, large)(scope, receive, send)
            return
        declared, _ = body_length(scope)
        body = self._bodies.begin(address(scope), declared)

        async def received() -> Message:
            message = await body.receive(receive)
            if body.complete:
                body.end()  # bytes held from here on are the app's own
            return message

        try:
            await self.app(scope, received, send)
        finally:
            body.end()


def fronted(app: ASGIApp, most: int, refusal: Callable[[int, str], ASGIApp]) -> ASGIApp:
    """Wrap an app whose bodies have `most` bytes at most; `refusal(status, detail)` answers what it does not see."""
    return BodyLimit(Paced(app, refusal), most, refusal)


def metered(most: int, protocol: type[asyncio.Protocol] = AutoHTTPProtocol) -> type[asyncio.Protocol]:
    """Make the protocol for `uvicorn.Config(http=...)` of a server whose bodies have `most` bytes at most.

    It closes a connection that has sent more than MAX_HEADERS without a request, or for one request more than chunks of
    few bytes can make of its body. It also closes the connections that `Patient` closes. `protocol`: uvicorn's, or one
    made of it.
    """

    class Metered(Patient, protocol):  # type: ignore[valid-type,misc]
        connections_of_all = Connections()
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
