"""`python -m sandbox.server`: programs by HTTP, as SandboxFusion serves them, in the strongest isolation that this
machine holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from sandbox import api, probe
from sandbox.api import RunStatus
from sandbox.client_bounds import ACCEPTED_AT_ONCE, Listener
from sandbox.fair import NotBegun, QueueFull
from sandbox.gate import ARRIVED, Gate, PatientProtocol
from sandbox.launch import SandboxFault
from sandbox.limits import MIB
from sandbox.service import Caller, Service, Settings
from sandbox.sessions import TooManySessions
from sandbox.supervise import FileRefused
from sandbox.tiers import Tier

T = TypeVar("T")
LONGEST_TIMEOUT = 24 * 3600 * 1000
"""Milliseconds."""


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


ClientHeader = Annotated[
    Annotated[str, Field(max_length=200)] | SkipJsonSchema[None],
    Header(
        description="Who shares the queue with others, and whose sessions are meant: a run. Else the client's address"
    ),
]
TimeoutHeader = Annotated[
    Annotated[int, Field(ge=0, le=LONGEST_TIMEOUT)] | SkipJsonSchema[None],
    Header(description="A request that has not begun after this time is dropped, and answered with 504"),
]


async def client(request: Request, x_client_id: ClientHeader = None) -> str:
    return x_client_id or (request.client.host if request.client else "")


Client = Annotated[str, Depends(client)]


async def caller(request: Request, name: Client, x_request_timeout_ms: TimeoutHeader = None) -> Caller:
    arrived: float = request.scope[ARRIVED]
    return Caller(name, None if x_request_timeout_ms is None else arrived + x_request_timeout_ms / 1000)


From = Annotated[Caller, Depends(caller)]
Responses = dict[int | str, dict[str, Any]]
INVALID: Responses = {422: {"model": api.Refusal, "description": "What is wrong with the request"}}
REFUSALS: Responses = {
    400: {"model": api.Refusal, "description": "The body is not UTF-8"},
    408: {"model": api.Refusal, "description": "The body did not come in time"},
    411: {"model": api.Refusal, "description": "The body has no Content-Length"},
    413: {"model": api.Refusal, "description": "The body is too large"},
    **INVALID,
    429: {
        "model": api.Refusal,
        "description": "No place in the queue, no session left, too much or too many half-sent bodies of this address: "
        "Retry-After says when to come",
    },
    431: {"model": api.Refusal, "description": "The headers are too large"},
    499: {"model": api.Refusal, "description": "The client closed the connection (nobody sees this answer)"},
    504: {"model": api.Refusal, "description": "Not begun within x-request-timeout-ms; nothing of it has run"},
}


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="agentrl sandbox", version="1")

    @app.exception_handler(QueueFull)
    async def _full(_: Request, error: QueueFull) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 429, {"Retry-After": str(error.retry_after)})

    @app.exception_handler(TooManySessions)
    async def _too_many(_: Request, error: TooManySessions) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 429, {"Retry-After": "5"})

    @app.exception_handler(NotBegun)
    async def _not_begun(_: Request, error: NotBegun) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 504)

    @app.exception_handler(FileRefused)
    async def _file_refused(_: Request, error: FileRefused) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422)

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

    @app.post("/run_code", responses=REFUSALS)
    async def run_code(body: api.RunCodeRequest, request: Request, who: From) -> api.RunCodeResponse:
        try:
            return await unless_gone(request, service.run_code(body, who))
        except SandboxFault as fault:
            return api.RunCodeResponse(
                status=RunStatus.SANDBOX_ERROR, message=str(fault), executor_pod_name=service.pod
            )

    @app.post("/run_jupyter", responses=REFUSALS)
    async def run_jupyter(body: api.RunJupyterRequest, request: Request, who: From) -> api.RunJupyterResponse:
        try:
            return await unless_gone(request, service.run_jupyter(body, who))
        except SandboxFault as fault:
            return api.RunJupyterResponse(
                status=RunStatus.SANDBOX_ERROR, message=str(fault), executor_pod_name=service.pod
            )

    @app.post("/run_session", responses=REFUSALS)
    async def run_session(body: api.RunSessionRequest, request: Request, who: From) -> api.RunSessionResponse:
        try:
            return await unless_gone(request, service.run_session(body, who))
        except SandboxFault as fault:
            return api.RunSessionResponse(
                status=RunStatus.SANDBOX_ERROR, message=str(fault), created=False, alive=False
            )

    @app.delete("/sessions/{session_id:path}", responses={**INVALID, 404: {"model": api.Refusal}})
    async def close_session(session_id: str, name: Client) -> api.SessionClosed:
        return api.SessionClosed(closed=await service.sessions.close(name, session_id))

    return app


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


def bound(host: str, port: int) -> socket.socket:
    """Does not listen yet: who comes too early is refused, and comes again. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def announce(listener: socket.socket) -> None:
    """Print the address at which the server listens, which is not what clients take its host's name for where that
    name is on loopback; warn of one that other machines reach.
    """
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    if not ipaddress.ip_address(address).is_loopback:
        print(
            f"warning: {shown} can be reached from other machines, and whoever reaches it may run programs",
            file=sys.stderr,
        )
    print(f"sandbox: serving on http://{shown}:{port}", flush=True)


async def serve(settings: Settings, listener: socket.socket) -> None:
    async with serving(settings) as service:
        print(service.found.describe(), flush=True)
        app = Gate(create_app(service))
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            ws="none",
            proxy_headers=False,
            log_level="warning",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=30,
            backlog=ACCEPTED_AT_ONCE,
        )
        announce(listener)
        await _Server(config).serve(sockets=[listener])


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 65535")
    return int(text)


def parse(arguments: list[str] | None = None) -> Settings:
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m sandbox.server", description="Run programs that nobody has read.")
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=_port, default=default.port)
    parser.add_argument(
        "--require", type=Tier, choices=list(Tier), default=default.require, help="weakest isolation to serve with"
    )
    parser.add_argument(
        "--tier", type=Tier, choices=list(Tier), help="exactly this isolation, not the strongest that holds"
    )
    parser.add_argument("--concurrency", type=_positive, default=default.concurrency, help="programs at once")
    parser.add_argument("--queue", type=int, default=default.queue, help="requests that may wait")
    parser.add_argument("--sessions", type=_positive, default=default.sessions, help="stateful sessions at once")
    parser.add_argument(
        "--idle-seconds", type=float, default=default.idle_seconds, help="after which an unused session ends"
    )
    parser.add_argument(
        "--client-concurrency", type=_positive, metavar="N", help="programs at once of one client; else all"
    )
    parser.add_argument(
        "--client-sessions", type=_positive, metavar="N", help="sessions at once of one client; else all"
    )
    parser.add_argument(
        "--memory-mb",
        type=_positive,
        default=default.limits.memory_bytes // MIB,
        help="of a program that asks for none",
    )
    parser.add_argument(
        "--max-memory-mb", type=_positive, default=default.max_memory_bytes // MIB, help="that a program may ask for"
    )
    parser.add_argument(
        "--total-memory-mb", type=_positive, metavar="MB", help="of all programs and sessions together; else unlimited"
    )
    parser.add_argument("--processes", type=_positive, default=default.limits.processes)
    parser.add_argument("--disk-mb", type=_positive, default=default.limits.disk_bytes // MIB)
    parser.add_argument(
        "--expose", action="append", default=[], metavar="FOLDER", help="a folder that programs may read"
    )
    asked = parser.parse_args(arguments)
    if asked.total_memory_mb and asked.total_memory_mb < 2 * asked.memory_mb:
        parser.error(f"--total-memory-mb {asked.total_memory_mb} is less than twice --memory-mb {asked.memory_mb}")
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
        client_concurrency=asked.client_concurrency,
        client_sessions=asked.client_sessions,
        limits=limits,
        max_memory_bytes=min(asked.max_memory_mb, asked.total_memory_mb or asked.max_memory_mb) * MIB,
        total_memory_bytes=asked.total_memory_mb and asked.total_memory_mb * MIB,
        expose=tuple(asked.expose),
    )


def main() -> None:
    settings = parse()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is one
    try:
        listener = bound(settings.host, settings.port)
    except OSError as error:
        sys.exit(f"sandbox: cannot listen at {settings.host} port {settings.port}: {error.strerror}")
    try:
        with listener, contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(settings, listener))
    except probe.NotIsolated as error:
        sys.exit(f"sandbox: {error}\nWeaker isolation is taken only if you ask for it: --require {' | '.join(Tier)}")


if __name__ == "__main__":
    main()
