"""`python -m sandbox.server`: programs by HTTP, as SandboxFusion serves them, in the strongest isolation that this
machine holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from sandbox import api, probe
from sandbox.api import RunStatus
from sandbox.fair import QueueFull
from sandbox.launch import SandboxFault
from sandbox.limits import MIB
from sandbox.service import Service, Settings
from sandbox.sessions import TooManySessions
from sandbox.tiers import Tier

T = TypeVar("T")
CLIENT_HEADER = "x-client-id"
"""Names who shares the queue: a run. Without it, the client's address does."""
MAX_BODY = 96 * MIB


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """`work`, cancelled when the client closes its connection."""
    job: asyncio.Task[T] = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise HTTPException(499, "the client is gone")
        return job.result()
    finally:
        job.cancel()
        gone.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="agentrl sandbox", version="1")

    def client(request: Request) -> str:
        return request.headers.get(CLIENT_HEADER) or (request.client.host if request.client else "")

    @app.exception_handler(QueueFull)
    async def _full(_: Request, error: QueueFull) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 429, {"Retry-After": str(error.retry_after)})

    @app.exception_handler(TooManySessions)
    async def _too_many(_: Request, error: TooManySessions) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 429, {"Retry-After": "5"})

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        # Not what was sent: it may be large, and no text at all.
        faults = [{key: fault[key] for key in ("type", "loc", "msg")} for fault in error.errors()]
        return Response(json.dumps({"detail": faults}), 422, media_type="application/json")

    @app.get("/v1/ping")
    async def ping() -> str:
        return "pong"

    @app.get("/health")
    async def health() -> api.Health:
        return service.health()

    busy: dict[int | str, dict[str, Any]] = {
        429: {"description": "The queue is full; Retry-After says when to come back"}
    }

    @app.post("/run_code", responses=busy)
    async def run_code(body: api.RunCodeRequest, request: Request) -> api.RunCodeResponse:
        try:
            return await unless_gone(request, service.run_code(body, client(request)))
        except SandboxFault as fault:
            return api.RunCodeResponse(
                status=RunStatus.SANDBOX_ERROR, message=str(fault), executor_pod_name=service.pod
            )

    @app.post("/run_jupyter", responses=busy)
    async def run_jupyter(body: api.RunJupyterRequest, request: Request) -> api.RunJupyterResponse:
        try:
            return await unless_gone(request, service.run_jupyter(body, client(request)))
        except SandboxFault as fault:
            return api.RunJupyterResponse(
                status=RunStatus.SANDBOX_ERROR, message=str(fault), executor_pod_name=service.pod
            )

    @app.post("/run_session", responses=busy)
    async def run_session(body: api.RunSessionRequest, request: Request) -> api.RunSessionResponse:
        try:
            return await unless_gone(request, service.run_session(body, client(request)))
        except SandboxFault as fault:
            return api.RunSessionResponse(
                status=RunStatus.SANDBOX_ERROR, message=str(fault), created=False, alive=False
            )

    @app.delete("/sessions/{session_id}")
    async def close_session(session_id: str) -> dict[str, bool]:
        return {"closed": await service.sessions.close(session_id)}

    return app


class BoundedBody:
    """ASGI: refuses bodies that are larger than `most`, or do not say how large they are, before they are read."""

    def __init__(self, app: Callable[..., Awaitable[None]], most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = dict(scope["headers"])
            length = headers.get(b"content-length", b"")
            refused = 411 if not length.isdigit() else 413 if int(length) > self.most else 0
            if refused:
                detail = f"the body must have a Content-Length of at most {self.most} bytes"
                await JSONResponse({"detail": detail}, refused, {"Connection": "close"})(scope, receive, send)
                return
        await self.app(scope, receive, send)


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Service]:
    """A service with its zygotes up; all is gone after. Raises probe.NotIsolated."""
    found = await probe.choose(settings.require, settings.expose, settings.tier)
    service = Service(settings, found)
    reaper = asyncio.create_task(service.sessions.end_idle())
    try:
        yield service
    finally:
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
        await service.sessions.close_all()
        await found.pool.stop()


class _Server(uvicorn.Server):
    """Ends at SIGINT and SIGTERM without raising them again afterwards: what the service holds has to be given back."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


async def serve(settings: Settings) -> None:
    async with serving(settings) as service:
        print(service.found.describe(), flush=True)
        app = BoundedBody(create_app(service), MAX_BODY)
        config = uvicorn.Config(
            app,
            settings.host,
            settings.port,
            log_level="warning",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=30,
            backlog=4096,
        )
        print(f"sandbox: serving on http://{settings.host}:{settings.port}", flush=True)
        await _Server(config).serve()


def parse(arguments: list[str] | None = None) -> Settings:
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m sandbox.server", description="Run programs that nobody has read.")
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=int, default=default.port)
    parser.add_argument(
        "--require", type=Tier, choices=list(Tier), default=default.require, help="weakest isolation to serve with"
    )
    parser.add_argument(
        "--tier", type=Tier, choices=list(Tier), help="exactly this isolation, not the strongest that holds"
    )
    parser.add_argument("--concurrency", type=int, default=default.concurrency, help="programs at once")
    parser.add_argument("--queue", type=int, default=default.queue, help="requests that may wait")
    parser.add_argument("--sessions", type=int, default=default.sessions, help="stateful sessions at once")
    parser.add_argument(
        "--idle-seconds", type=float, default=default.idle_seconds, help="after which an unused session ends"
    )
    parser.add_argument(
        "--memory-mb", type=int, default=default.limits.memory_bytes // MIB, help="of a program that asks for none"
    )
    parser.add_argument(
        "--max-memory-mb", type=int, default=default.max_memory_bytes // MIB, help="that a program may ask for"
    )
    parser.add_argument("--processes", type=int, default=default.limits.processes)
    parser.add_argument("--disk-mb", type=int, default=default.limits.disk_bytes // MIB)
    parser.add_argument(
        "--expose", action="append", default=[], metavar="FOLDER", help="a folder that programs may read"
    )
    asked = parser.parse_args(arguments)
    limits = replace(
        default.limits, memory_bytes=asked.memory_mb * MIB, processes=asked.processes, disk_bytes=asked.disk_mb * MIB
    )
    return Settings(
        host=asked.host,
        port=asked.port,
        require=asked.require,
        tier=asked.tier,
        concurrency=asked.concurrency,
        queue=asked.queue,
        sessions=asked.sessions,
        idle_seconds=asked.idle_seconds,
        limits=limits,
        max_memory_bytes=asked.max_memory_mb * MIB,
        expose=tuple(asked.expose),
    )


def main() -> None:
    settings = parse()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(settings))
    except probe.NotIsolated as error:
        sys.exit(f"sandbox: {error}\nWeaker isolation is taken only if you ask for it: --require {' | '.join(Tier)}")


if __name__ == "__main__":
    main()
