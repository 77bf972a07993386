"""Sessions that programs ask the endpoint for, over one HTTP response for as long as they live.

A program connects with a ticket's token and is sent a line of JSON for each session that it is to act in. It posts the
result to the session's address for scores. A connection holds a limited number of sessions, which end with it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from agentrl.agents.task import API_KEY, MODEL, AgentFailed, AgentTask
from agentrl.errors import UserError

TICK_SECONDS = 5.0
"""Seconds between two blank lines of a connection, by which both sides see that the other one is there."""
LEFT_SECONDS = 30.0
"""Seconds in which a program must notice that the trainer has ended a session; see `Connection.left`."""


@dataclass(slots=True, eq=False)
class Ticket:
    """Right to connect, for the holder of the token."""

    token: str
    sessions_at_once: int
    single: bool
    """One connection at a time."""
    on_connect: Callable[[Connection], None]
    on_end: Callable[[Connection], None]
    """Called with a connection that ended; settles the jobs that it still has."""


@dataclass(slots=True, eq=False)
class Job:
    """A task that waits for a program, or that one acts on."""

    task: AgentTask
    result: asyncio.Future[dict[str, float]]

    def end(self, report: dict[str, float]) -> None:
        """End it with a report, unless it has ended."""
        if not self.result.done():
            self.result.set_result(report)

    def fail(self, error: AgentFailed | UserError) -> None:
        """End it with an error, unless it has ended."""
        if not self.result.done():
            self.result.set_exception(error)


@dataclass(slots=True, eq=False)
class Connection:
    """One program's response."""

    ticket: Ticket
    url: str
    """Address of the endpoint as the program knows it."""
    jobs: dict[str, Job] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    """Sessions that the trainer ended, and the time of that. Each keeps its place until the program posts a result,
    which is refused. A program that posts no result within LEFT_SECONDS gets no more sessions, and is disconnected
    when its others have ended."""
    outbox: deque[Job] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ending: bool = False

    @property
    def free(self) -> int:
        """Number of sessions that it can take."""
        return 0 if self._hangs else self.ticket.sessions_at_once - len(self.jobs) - len(self.left)

    @property
    def done(self) -> bool:
        """True if the response is to end."""
        return self.ending or (self._hangs and not self.jobs)

    @property
    def _hangs(self) -> bool:
        return bool(self.left) and time.monotonic() > min(self.left.values()) + LEFT_SECONDS

    def take(self, job: Job) -> None:
        """Send a job."""
        self.jobs[job.task.report_token] = job
        self.outbox.append(job)
        self.wake.set()

    def end(self) -> None:
        """End the response."""
        self.ending = True
        self.wake.set()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield a line for each session, and blank lines meanwhile, until the connection is to end."""
        yield b"\n"
        while not self.done:
            while self.outbox:
                yield self._line(self.outbox.popleft().task)
            self.wake.clear()
            try:
                await asyncio.wait_for(self.wake.wait(), TICK_SECONDS)
            except TimeoutError:
                yield b"\n"

    def _line(self, task: AgentTask) -> bytes:
        urls = {"base_url": f"{self.url}/{task.token}/v1", "report_url": f"{self.url}/{task.report_token}/v1"}
        line = {**urls, "api_key": API_KEY, "model": MODEL, "sample": task.sample}
        return json.dumps(line, default=str).encode() + b"\n"


class SessionQueue:
    """Tasks without a program, and the connected programs."""

    def __init__(self) -> None:
        self.url = ""
        """Address of the endpoint."""
        self._tickets: dict[str, Ticket] = {}
        self._connections: list[Connection] = []
        self._waiting: deque[Job] = deque()
        self.wanted = asyncio.Event()
        """Event that is set while tasks wait for a program."""
        self._held: dict[str, Connection] = {}
        """Connections by the token for scores of each session that they hold."""

    def admit(self, ticket: Ticket) -> None:
        """Let programs connect by the ticket."""
        self._tickets[ticket.token] = ticket

    def revoke(self, ticket: Ticket) -> None:
        """End the ticket's connections, and let no program connect by it."""
        self._tickets.pop(ticket.token, None)
        for connection in [one for one in self._connections if one.ticket is ticket]:
            connection.end()

    def close(self) -> None:
        """End all connections."""
        for ticket in list(self._tickets.values()):
            self.revoke(ticket)

    def ticket(self, token: str) -> Ticket | None:
        """Find a ticket by its token."""
        return self._tickets.get(token)

    def is_taken(self, ticket: Ticket) -> bool:
        """Check whether the ticket's one connection is there."""
        return ticket.single and any(one.ticket is ticket for one in self._connections)

    async def connect(self, ticket: Ticket, url: str) -> AsyncIterator[bytes]:
        """Yield the lines of a new connection, which ends with the iterator."""
        connection = Connection(ticket, url)
        self._connections.append(connection)
        ticket.on_connect(connection)
        self._hand_out()
        try:
            async for line in connection.lines():
                self._hand_out()  # A place may be free again, for the time that passed.
                yield line
        finally:
            self._connections.remove(connection)
            for token in (*connection.jobs, *connection.left):
                del self._held[token]
            ticket.on_end(connection)

    async def run(self, task: AgentTask) -> dict[str, float]:
        """Have a program act on the task; return its report. Raises the job's failure."""
        job = Job(task, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self.wanted.set()
        self._hand_out()
        try:
            return await job.result
        finally:
            self._drop(job)

    def settle(self, token: str) -> Job | None:
        """Take the job of a session whose program says that it is over; None if the trainer ended it before."""
        connection = self._held.pop(token, None)
        if connection is None:
            return None
        connection.left.pop(token, None)
        job = connection.jobs.pop(token, None)
        self._hand_out()
        connection.wake.set()
        return job

    def fail_waiting(self, make: Callable[[], UserError]) -> None:
        """End all tasks that no program has."""
        while self._waiting:
            self._waiting.popleft().fail(make())
        self.wanted.clear()

    def _drop(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        token = job.task.report_token
        connection = self._held.get(token)
        if connection is not None and connection.jobs.pop(token, None) is not None:
            connection.left[token] = time.monotonic()
            connection.wake.set()

    def _hand_out(self) -> None:
        while self._waiting:
            connection = max(self._connections, key=lambda one: one.free, default=None)
            if connection is None or connection.free <= 0:
                return
            job = self._waiting.popleft()
            self._held[job.task.report_token] = connection
            connection.take(job)
        self.wanted.clear()
