"""The endpoints' work: a request becomes a job, takes its turn, and its outcome becomes an answer. Nothing of HTTP
but the status of a refusal.
"""

from __future__ import annotations

import base64
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fastapi import HTTPException

from sandbox import api, probe
from sandbox.api import CommandResult, CommandStatus, RunStatus
from sandbox.fair import FairQueue
from sandbox.languages import RECIPES, Language, environment, missing, warm_for
from sandbox.limits import MIB, Limit, Limits
from sandbox.pool import Command, CommandOutcome, Job
from sandbox.sessions import SHARE, Cell, CellOutcome, Session, Sessions
from sandbox.tiers import Tier

COMPILER_MEMORY = 1024 * MIB
MAX_NOTEBOOK = 32 * MIB
"""Bytes that all cells of a notebook may write."""


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
    client_concurrency: int | None = None
    client_sessions: int | None = None
    limits: Limits = field(default_factory=Limits)
    max_memory_bytes: int = 4096 * MIB
    total_memory_bytes: int | None = None
    expose: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that asks."""

    name: str
    begin_before: float | None = None
    """Time at which the request is dropped unless it has begun, in seconds of the loop's clock; None: never."""


class Service:
    """The endpoints' work. Raises QueueFull, NotBegun, TooManySessions, FileRefused, SandboxFault."""

    def __init__(self, settings: Settings, found: probe.Found) -> None:
        self.settings, self.found, self.pool = settings, found, found.pool
        self.queue = FairQueue(
            settings.concurrency,
            settings.queue,
            settings.total_memory_bytes or math.inf,
            settings.client_concurrency or math.inf,
        )
        self.sessions = Sessions(
            self.pool, self.queue, settings.sessions, settings.idle_seconds, settings.client_sessions or math.inf
        )
        if settings.total_memory_bytes and self.pool.groups:
            self.pool.groups.limit_memory(settings.total_memory_bytes)
        self.pod = os.environ.get("MY_POD_NAME")
        self.absent = {language: missing(language) for language in Language}

    def limits(self, memory_mb: int, seconds: float, most: float = math.inf) -> Limits:
        """Raises HTTPException (422)."""
        limits = replace(self.settings.limits, wall_seconds=seconds, cpu_seconds=2 * seconds + 1)
        if memory_mb > 0:
            most = min(most, self.settings.max_memory_bytes)
            if memory_mb * MIB > most:
                why = "--max-memory-mb; of a session half of --total-memory-mb"
                raise HTTPException(
                    422, f"memory_limit_MB {memory_mb}: this server gives at most {int(most) // MIB} ({why})"
                )
            limits = replace(limits, memory_bytes=memory_mb * MIB)
        return limits

    async def run_code(self, asked: api.RunCodeRequest, caller: Caller) -> api.RunCodeResponse:
        recipe = RECIPES[asked.language]
        if absent := self.absent[asked.language]:
            message = f"{asked.language} is not available on this server: it has no {absent}"
            return api.RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message=message, executor_pod_name=self.pod)
        limits = self.limits(asked.memory_limit_MB, asked.run_timeout)
        extra = environment(asked.language)
        run = None if recipe.run is None else [*recipe.run, *asked.args]
        commands = [Command(run, asked.run_timeout, recipe.file, asked.args, extra, asked.show_last_expression)]
        if recipe.compile:
            commands.insert(0, Command(recipe.compile, asked.compile_timeout, environment=extra))
            seconds = 2 * (asked.run_timeout + asked.compile_timeout) + 1
            memory = max(limits.memory_bytes, COMPILER_MEMORY)
            memory = min(memory, self.settings.total_memory_bytes or memory)
            limits = replace(limits, cpu_seconds=seconds, memory_bytes=memory)
        source = asked.code.encode(errors="surrogatepass")
        job = Job(
            commands,
            {**_decoded(asked.files), recipe.file: source},
            (asked.stdin or "").encode(errors="surrogatepass"),
            asked.fetch_files,
            warm_for(asked.code) if asked.language is Language.PYTHON else "",
        )
        async with self.queue.turn(caller.name, limits.memory_bytes, caller.begin_before):
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

    async def run_jupyter(self, asked: api.RunJupyterRequest, caller: Caller) -> api.RunJupyterResponse:
        limits = self.limits(-1, asked.total_timeout)
        async with self.queue.turn(caller.name, limits.memory_bytes, caller.begin_before):
            session = await Session.open(self.pool, limits)
            try:
                return await self._cells(session, asked)
            finally:
                await session.close()

    async def _cells(self, session: Session, asked: api.RunJupyterRequest) -> api.RunJupyterResponse:
        started, done, size = time.monotonic(), [], 0
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
            size += sum(len(each) for each in (outcome.stdout, outcome.stderr, outcome.result or ""))
            if size > MAX_NOTEBOOK:
                outcome.limits.append(Limit.OUTPUT)
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

    async def run_session(self, asked: api.RunSessionRequest, caller: Caller) -> api.RunSessionResponse:
        limits = self.limits(asked.memory_limit_MB, asked.run_timeout, self.queue.most_memory * SHARE)
        limits = replace(limits, cpu_seconds=self.settings.idle_seconds * 4)
        cell = Cell(asked.code, asked.run_timeout, _decoded(asked.files), asked.fetch_files)
        outcome = await self.sessions.execute(caller.name, asked.session_id, cell, limits, caller.begin_before)
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
            memory_bytes=self.sessions.memory_of(caller.name, asked.session_id),
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
            reserved_memory_bytes=self.queue.memory,
            total_memory_bytes=self.settings.total_memory_bytes,
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
