"""The key of a vLLM server. vLLM's own `--api-key` leaves the routes open that exchange weights."""

from __future__ import annotations

import os
import secrets

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.engines.servers.http import key_header
from agentrl.engines.servers.starter import KEY

_key = os.environ.pop(KEY, None)  # before there are processes that would inherit it


class Guard:
    """Middleware that answers only to the key, but for `/health`. Without a key it answers everyone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._wanted = key_header(_key).get("authorization", "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._wanted and scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._wanted):
                refusal = JSONResponse({"error": "wrong or missing key"}, 401)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)
