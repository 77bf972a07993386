"""`python -m sandbox.server`: programs by HTTP, as SandboxFusion serves them, in the strongest isolation that this
machine holds.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from sandbox import api, probe
from sandbox.api import CommandResult, CommandStatus, RunStatus
from sandbox.fair import FairQueue, QueueFull
from sandbox.languages import RECIPES, Language, environment, is_numerical, missing
from sandbox.limits import MIB, Limit, Limits
from sandbox.pool import Command, CommandOutcome, Job, SandboxFault
from sandbox.sessions import Cell, CellOutcome, Session, Sessions, TooManySessions
from sandbox.tiers import Tier

T = TypeVar("T")
CLIENT_HEADER = "x-client-id"
"""Names who shares the queue: a run. Without it, the client's address does."""
MAX_BODY = 96 * MIB
COMPILER_MEMORY = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8080
    require: Tier = Tier.NAMESPACES
    tier: Tier | None = None
    concurrency: int = 2 * (os.cpu_count() or 1)
    queue: int = 1024
    sessions: int = 256
    idle_seconds: float = 300.0
    limits: Limits = Limits()
    max_memory_bytes: int = 4096 * MIB
    expose: tuple[str, ...] = ()


class Service:
    """The endpoints' work. Raises QueueFull, TooManySessions, SandboxFault."""

    def __init__(self, settings: Settings, found: probe.Found) -> None:
        self.settings, self.found, self.pool = settings, found, found.pool
        self.queue = FairQueue(settings.concurrency, settings.queue)
        self.sessions = Sessions(self.pool, settings.sessions, settings.idle_seconds)
        self.pod = os.environ.get("MY_POD_NAME")
        self.absent = {language: missing(language) for language in Language}

    def limits(self, memory_mb: int, seconds: float) -> Limits:
        """Raises HTTPException (422)."""
        limits = replace(self.settings.limits, wall_seconds=seconds, cpu_seconds=2 * seconds + 1)
        if memory_mb > 0:
            if memory_mb * MIB > self.settings.max_memory_bytes:
                most = self.settings.max_memory_bytes // MIB
                raise HTTPException(
                    422, f"memory_limit_MB {memory_mb}: this server gives at most {most} (--max-memory-mb)"
                )
            limits = replace(limits, memory_bytes=memory_mb * MIB)
        return limits

    async def run_code(self, asked: api.RunCodeRequest, client: str) -> api.RunCodeResponse:
        recipe = RECIPES[asked.language]
        if absent := self.absent[asked.language]:
            message = f"{asked.language} is not available on this server: it has no {absent}"
            return api.RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message=message, executor_pod_name=self.pod)
        limits = self.limits(asked.memory_limit_MB, asked.run_timeout)
        extra = environment(asked.language)
        run = None if recipe.run is None else [*recipe.run, *asked.args]
        commands = [Command(run, asked.run_timeout, recipe.file, asked.args, extra)]
        if recipe.compile:
            commands.insert(0, Command(recipe.compile, asked.compile_timeout, environment=extra))
            seconds = 2 * (asked.run_timeout + asked.compile_timeout) + 1
            limits = replace(limits, cpu_seconds=seconds, memory_bytes=max(limits.memory_bytes, COMPILER_MEMORY))
        source = asked.code.encode(errors="surrogatepass")
        job = Job(
            commands,
            {**_decoded(asked.files), recipe.file: source},
            (asked.stdin or "").encode(errors="surrogatepass"),
            asked.fetch_files,
            asked.language is Language.PYTHON and is_numerical(asked.code),
        )
        async with self.queue.turn(client):
            outcome = await self.pool.run(job, limits)
        results = [_result(command) for command in outcome.commands]
        compiled = results.pop(0) if recipe.compile else None
        status, message = _verdict([compiled, *results] if compiled else results, outcome.commands)
        return api.RunCodeResponse(
            status=status,
            message=message,
            compile_result=compiled,
            run_result=results[0] if results else None,
            executor_pod_name=self.pod,
            files={path: base64.b64encode(content).decode() for path, content in outcome.files.items()},
            refused_files=outcome.refused,
        )

    async def run_jupyter(self, asked: api.RunJupyterRequest, client: str) -> api.RunJupyterResponse:
        limits = self.limits(-1, asked.total_timeout)
        async with self.queue.turn(client):
            session = await Session.open(self.pool, limits)
            try:
                return await self._cells(session, asked)
            finally:
                await session.close()

    async def _cells(self, session: Session, asked: api.RunJupyterRequest) -> api.RunJupyterResponse:
        started, done = time.monotonic(), []
        answer = api.RunJupyterResponse(status=RunStatus.SUCCESS, message="", executor_pod_name=self.pod)
        driver = CommandResult(status=CommandStatus.FINISHED, return_code=0, stdout="", stderr="")
        for place, code in enumerate(asked.cells):
            left = asked.total_timeout - (time.monotonic() - started)
            seconds = min(asked.cell_timeout or left, left)
            files = _decoded(asked.files) if place == 0 else {}
            fetch = asked.fetch_files if place == len(asked.cells) - 1 else []
            outcome = await session.execute(Cell(code, max(0.001, seconds), files, fetch))
            done.append(_cell(outcome))
            answer.files = outcome.files
            if outcome.limits or not outcome.alive:
                timed_out = Limit.WALL_TIME in outcome.limits
                driver.status = CommandStatus.TIME_LIMIT if timed_out else CommandStatus.FINISHED
                driver.return_code, driver.limits = outcome.code, outcome.limits
                answer.status = RunStatus.FAILED
                answer.message = (
                    _sentence(outcome.limits) or f"the kernel ended with status {outcome.code} in cell {place + 1}"
                )
                break
        driver.execution_time = time.monotonic() - started
        answer.driver, answer.cells = driver, done
        return answer

    async def run_session(self, asked: api.RunSessionRequest, client: str) -> api.RunSessionResponse:
        limits = replace(
            self.limits(asked.memory_limit_MB, asked.run_timeout), cpu_seconds=self.settings.idle_seconds * 4
        )
        cell = Cell(asked.code, asked.run_timeout, _decoded(asked.files), asked.fetch_files)
        async with self.queue.turn(client):
            outcome = await self.sessions.execute(asked.session_id, cell, limits)
        timed_out = Limit.WALL_TIME in outcome.limits
        failed = bool(outcome.limits) or outcome.error is not None or not outcome.alive
        return api.RunSessionResponse(
            status=RunStatus.FAILED if failed else RunStatus.SUCCESS,
            message=_sentence(outcome.limits),
            created=outcome.created,
            alive=outcome.alive,
            run_result=CommandResult(
                status=CommandStatus.TIME_LIMIT if timed_out else CommandStatus.FINISHED,
                execution_time=outcome.seconds,
                return_code=outcome.code if not outcome.alive else int(outcome.error is not None),
                stdout=_text(outcome.stdout),
                stderr=_text(outcome.stderr),
                limits=outcome.limits,
                cut=outcome.cut,
            ),
            result=outcome.result,
            error=outcome.error,
            memory_bytes=self.sessions.memory_of(asked.session_id),
            files=outcome.files,
            refused_files=outcome.refused,
        )

    def health(self) -> api.Health:
        tier = self.pool.tier
        return api.Health(
            status="ok",
            tier=tier,
            guarantees=[str(guarantee) for guarantee in tier.guarantees],
            missing_guarantees=[str(guarantee) for guarantee in tier.missing],
            refused_tiers={str(other): why for other, why in self.found.refused.items()},
            languages=[str(language) for language, absent in self.absent.items() if not absent],
            preloaded=self.pool.loaded,
            running=self.queue.running,
            waiting=self.queue.waiting,
            sessions=len(self.sessions),
            session_memory_bytes=self.sessions.memory_bytes,
        )


def _decoded(files: Mapping[str, str | None]) -> dict[str, bytes]:
    return {path: base64.b64decode(content) for path, content in files.items() if content is not None}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _result(command: CommandOutcome) -> CommandResult:
    timed_out = Limit.WALL_TIME in command.limits
    status = CommandStatus.ERROR if command.error else CommandStatus.TIME_LIMIT if timed_out else CommandStatus.FINISHED
    code = command.code if command.signal is None else -command.signal
    return CommandResult(
        status=status,
        execution_time=command.seconds,
        return_code=None if timed_out or command.error else code,
        stdout=_text(command.stdout),
        stderr=_text(command.stderr),
        limits=command.limits,
        cut=command.cut,
    )


def _verdict(results: list[CommandResult], commands: list[CommandOutcome]) -> tuple[RunStatus, str]:
    errors = [command.error for command in commands if command.error]
    if errors:
        return RunStatus.SANDBOX_ERROR, errors[0]
    good = all(result.status is CommandStatus.FINISHED and result.return_code == 0 for result in results)
    return RunStatus.SUCCESS if good else RunStatus.FAILED, _sentence(
        [limit for result in results for limit in result.limits]
    )


def _sentence(limits: list[Limit]) -> str:
    return f"limits reached: {', '.join(limits)}" if limits else ""


def _cell(outcome: CellOutcome) -> api.CellRunResult:
    return api.CellRunResult(
        stdout=_text(outcome.stdout),
        stderr=_text(outcome.stderr),
        display=[] if outcome.result is None else [{"text/plain": outcome.result}],
        error=[outcome.error] if outcome.error else [],
    )


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
        "--require", type=Tier, choices=list(Tier), default=default.require, help="the weakest isolation to serve with"
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
        asked.host, asked.port, asked.require, asked.tier, asked.concurrency, asked.queue, asked.sessions, asked.idle_seconds, limits,
        asked.max_memory_mb * MIB, tuple(asked.expose),
    )  # fmt: skip


def main() -> None:
    settings = parse()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(settings))
    except probe.NotIsolated as error:
        sys.exit(f"sandbox: {error}\nWeaker isolation is taken only if you ask for it: --require {' | '.join(Tier)}")


if __name__ == "__main__":
    main()
