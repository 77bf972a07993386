"""Agents that live on: processes of a pool, or programs elsewhere, that take one session after another."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import cast

from agentrl.agents.agent import Agent, AgentOptions
from agentrl.agents.process import AgentProcess, ProgramAgent
from agentrl.agents.session_queue import Connection, SessionQueue, Ticket
from agentrl.agents.task import AgentError, AgentFailed, AgentTask
from agentrl.errors import ConfigError
from agentrl.system.processes import LocalProcess

DEATHS_IN_A_ROW = 3
"""Ends of processes, for each of the pool's, without a result between them, after which the pool is given up."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
"""Seconds before a process is started again: doubled with each end in a row."""
EXIT_SECONDS = 5.0
"""Seconds in which a process must end after its connection."""
SHORTEST_TOKEN = 16


def build_pool(options: AgentOptions) -> Agent:
    """Make the pool of processes of `openai_proxy.command`. Raises ConfigError."""
    if options.command is None or options.target is not None:
        raise ConfigError("openai_proxy.start=pool: set openai_proxy.command, and not openai_proxy.target")
    return PoolAgent(options.command, options.processes, options.sessions_at_once, passed_on=options.pass_env)


def build_remote(options: AgentOptions) -> Agent:
    """Make the agent whose programs connect from elsewhere. Raises ConfigError."""
    if options.command is not None or options.target is not None:
        raise ConfigError("openai_proxy.start=remote: programs elsewhere connect; set neither target nor command")
    token = os.environ.get(options.token_env or "", "")
    if options.token_env is None or not options.port:
        raise ConfigError("openai_proxy.start=remote: set openai_proxy.token_env and openai_proxy.port")
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"openai_proxy.token_env: expected a token of at least {SHORTEST_TOKEN} printable ASCII characters in the "
            f"environment variable {options.token_env}, found {f'{len(token)} characters' if token else 'nothing'}; "
            "e.g. python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return RemoteAgent(token, options.sessions_at_once)


class QueuedAgent(ProgramAgent):
    """Agent whose programs take tasks from the endpoint's queue."""

    queue: SessionQueue | None = None

    async def start(self, queue: SessionQueue) -> None:
        self.queue = queue

    async def run(self, task: AgentTask) -> dict[str, float]:
        assert self.queue is not None
        return await self.queue.run(task)


class RemoteAgent(QueuedAgent):
    """Programs that somebody else starts, and that connect by one token."""

    name = "a remote agent"

    def __init__(self, token: str, sessions_at_once: int) -> None:
        self._ticket = Ticket(token, sessions_at_once, False, lambda connection: None, self._on_end)

    async def start(self, queue: SessionQueue) -> None:
        await super().start(queue)
        queue.admit(self._ticket)

    def _on_end(self, connection: Connection) -> None:
        for job in connection.jobs.values():
            job.fail(AgentFailed(f"{self.name} has closed its connection before it posted the result of this session"))


class PoolAgent(QueuedAgent):
    """Processes of a command that each take many sessions, and are started again when they end."""

    def __init__(
        self, command: Sequence[str], processes: int, sessions_at_once: int, *, passed_on: Sequence[str] = ()
    ) -> None:
        """`passed_on`: further variables of this process's environment that the processes may see."""
        self._command, self._passed_on = list(command), passed_on
        self._processes, self._sessions_at_once = processes, sessions_at_once
        self.name = f"agent command {' '.join(command)}"
        self._slots: list[asyncio.Task[None]] = []
        self._given_up: str | None = None
        """Reason why no process is started any more."""
        self._deaths = 0
        """Ends of processes since the last result."""
        self._starts, self._start_seconds = 0, 0.0
        """Starts that no task has counted yet, and their CPU time."""

    async def start(self, queue: SessionQueue) -> None:
        await super().start(queue)
        self._slots = [asyncio.create_task(self._keep(queue)) for _ in range(self._processes)]

    async def close(self) -> None:
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)

    async def run(self, task: AgentTask) -> dict[str, float]:
        if self._given_up is not None:
            raise self.error(self._given_up)
        report = await super().run(task)
        self._deaths = 0
        task.count_start(self._starts, self._start_seconds)
        self._starts, self._start_seconds = 0, 0.0
        return report

    async def _keep(self, queue: SessionQueue) -> None:
        """Have one process, again and again."""
        while True:
            await queue.wanted.wait()
            try:
                error, is_started = await self._one(queue), True
            except (AgentError, AgentFailed) as failed:
                error, is_started = failed, False
            self._deaths += 1
            if self._deaths >= DEATHS_IN_A_ROW * self._processes or (isinstance(error, AgentError) and not is_started):
                self._given_up = reason = f"its processes ended {self._deaths} times without a result between: {error}"
                queue.fail_waiting(partial(self.error, reason))
                return
            await asyncio.sleep(min(FIRST_WAIT * 2 ** min(self._deaths, 16), LONGEST_WAIT))

    async def _one(self, queue: SessionQueue) -> AgentError | AgentFailed:
        """Run one process to its end; return the error that its sessions end with."""
        token = secrets.token_urlsafe(24)
        connections: list[Connection] = []
        more = {"AGENTRL_URL": queue.url, "AGENTRL_TOKEN": token}
        process: AgentProcess | None = None
        left = asyncio.Event()

        def connected(connection: Connection) -> None:
            connections.append(connection)
            self._start_seconds += 0.0 if process is None else process.process.cpu_seconds()

        ticket = Ticket(token, self._sessions_at_once, True, connected, lambda connection: left.set())
        queue.admit(ticket)  # First: on a busy machine the process may connect before its start returns here.
        try:
            process = await AgentProcess.start(self._command, self._passed_on, more, token)
            self._starts += 1
            ending = asyncio.create_task(_end_after(left, cast(LocalProcess, process.process)))
            try:
                await process.process.ended()
            finally:
                ending.cancel()
        finally:
            queue.revoke(ticket)
        error = process.failure(f"agent command {self._command[0]}")
        jobs = [job for connection in connections for job in connection.jobs.values()]
        for job in jobs:
            # Nobody knows which of several sessions the process died of.
            alone = len(jobs) == 1 or isinstance(error, AgentFailed)
            job.fail(error if alone else AgentFailed(str(error)))
        return error


async def _end_after(left: asyncio.Event, process: LocalProcess) -> None:
    """Kill a process that does not end by itself after its connection."""
    await left.wait()
    process.stdin.close()
    await asyncio.wait({process.exited}, timeout=EXIT_SECONDS)
    process.kill()
