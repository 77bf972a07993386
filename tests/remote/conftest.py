"""A real web server in the test's event loop that misbehaves as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Faulty = Callable[..., Awaitable["FaultyServer"]]


@dataclass
class FaultyServer:
    """Handlers are used up one a request, the last one again and again; what was asked is kept."""

    handlers: list[Handler]
    port: int = 0
    asked: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        self.bodies.append(await request.read())
        handler = self.handlers.pop(0) if len(self.handlers) > 1 else self.handlers[0]
        return await handler(request)


def says(status: int, text: str = "", **headers: str) -> Handler:
    """Answers so at once."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, headers=named)

    return handler


async def hangs(request: web.Request) -> web.StreamResponse:
    """Never answers."""
    await asyncio.sleep(3600)
    raise AssertionError


async def breaks(request: web.Request) -> web.StreamResponse:
    """Closes the connection in the middle of its answer."""
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"half")
    assert request.transport is not None
    request.transport.close()
    return response


@pytest.fixture
async def server() -> AsyncIterator[Callable[..., Awaitable[FaultyServer]]]:
    """Starts servers that answer with the given handlers."""
    started: list[FaultyServer] = []

    async def start(*handlers: Handler) -> FaultyServer:
        started.append(FaultyServer(list(handlers)))
        await started[-1].start()
        return started[-1]

    yield start
    for one in started:
        await one.stop()
