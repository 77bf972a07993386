"""A bounded queue for a bounded number of runs and a bounded sum of their memory, shared fairly by clients.

A turn goes to the clients one after another, not to the longest line. Who is next waits until a place and its memory
are free; nobody overtakes it, unless it is its client's own cap that it waits for. A full queue refuses the newcomer,
unless another client has at least two more waiting: then that one's newest is refused instead. So one client can fill
the queue only while nobody else wants it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


class QueueFull(Exception):
    """Come back after `retry_after` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class NotBegun(Exception):
    """The time that the client gave the request was over before its turn came. Nothing of it has run."""

    def __init__(self) -> None:
        super().__init__("not begun within the time that the request gave (x-request-timeout-ms)")


@asynccontextmanager
async def before(moment: float | None) -> AsyncIterator[None]:
    """Bound a wait: what waits inside raises NotBegun at `moment` (the loop's clock; None: never)."""
    if moment is not None and moment <= asyncio.get_running_loop().time():
        raise NotBegun
    try:
        async with asyncio.timeout_at(moment):
            yield
    except TimeoutError:
        raise NotBegun from None


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    client: str
    memory: int
    turn: asyncio.Future[None]


class FairQueue:
    """At most `running` turns at once, `each` of them of one client, that hold `memory` bytes together; and at most
    `waiting` that wait.
    """

    def __init__(self, running: int, waiting: int, memory: float = math.inf, each: float = math.inf) -> None:
        self.most_running, self.most_waiting, self.most_memory, self.most_each = running, waiting, memory, each
        self.running = 0
        self.memory = 0
        """Bytes promised to turns, and by `hold` to what outlives one."""
        self._running_of: Counter[str] = Counter()
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._mean_seconds = 0.1

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    @asynccontextmanager
    async def turn(self, client: str, memory: int = 0, begin_before: float | None = None) -> AsyncIterator[None]:
        """Wait for a turn with `memory` bytes, and hold it. Raises QueueFull, NotBegun."""
        asked = _Waiting(client, memory, asyncio.get_running_loop().create_future())
        async with before(begin_before):
            await self._wait(asked)
        started = time.monotonic()
        try:
            yield
        finally:
            self._mean_seconds += 0.1 * (time.monotonic() - started - self._mean_seconds)
            self._give_back(asked)

    def hold(self, memory: int) -> None:
        """Take `memory` bytes without a turn, or give them back (negative)."""
        self.memory += memory
        self._next()

    async def _wait(self, asked: _Waiting) -> None:
        self._lines.setdefault(asked.client, deque()).append(asked)
        self._next()
        if not asked.turn.done() and self.waiting > self.most_waiting:
            self._make_room(asked)
        try:
            await asked.turn
        except asyncio.CancelledError:
            if asked.turn.done() and not asked.turn.cancelled() and asked.turn.exception() is None:  # just given
                self._give_back(asked)
            else:
                self._drop(asked)
                self._next()
            raise

    def _give_back(self, held: _Waiting) -> None:
        self.running -= 1
        self.memory -= held.memory
        self._running_of[held.client] -= 1
        self._running_of += Counter()  # forgets clients that have none
        self._next()

    def _make_room(self, newcomer: _Waiting) -> None:
        longest = max(self._lines, key=lambda name: len(self._lines[name]))
        own = self._lines[newcomer.client]
        if longest == newcomer.client or len(self._lines[longest]) < len(own) + 1:
            self._drop(newcomer)
            raise QueueFull(self._retry_after())
        refused = self._lines[longest][-1]
        self._drop(refused)
        refused.turn.set_exception(QueueFull(self._retry_after()))

    def _drop(self, asked: _Waiting) -> None:
        line = self._lines.get(asked.client)
        if line is not None and asked in line:
            line.remove(asked)
            if not line:
                del self._lines[asked.client]

    def _next(self) -> None:
        while self.running < self.most_running:
            client = next((name for name in self._lines if self._running_of[name] < self.most_each), None)
            if client is None or self.memory + self._lines[client][0].memory > self.most_memory:
                return
            line = self._lines[client]
            asked = line.popleft()
            self._lines.move_to_end(client)
            if not line:
                del self._lines[client]
            if not asked.turn.done():
                self.running += 1
                self.memory += asked.memory
                self._running_of[client] += 1
                asked.turn.set_result(None)

    def _retry_after(self) -> int:
        return min(60, max(1, math.ceil(self.waiting * self._mean_seconds / self.most_running)))
