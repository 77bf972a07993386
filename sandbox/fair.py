"""A bounded queue for a bounded number of runs, shared fairly by clients.

A turn goes to the clients one after another, not to the longest line. A full queue refuses the newcomer, unless another
client has at least two more waiting: then that one's newest is refused instead. So one client can fill the queue only
while nobody else wants it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class QueueFull(Exception):
    """Come back after `retry_after` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class FairQueue:
    def __init__(self, running: int, waiting: int) -> None:
        self.most_running, self.most_waiting = running, waiting
        self.running = 0
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._mean_seconds = 0.1

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Raises QueueFull."""
        await self._wait(client)
        started = time.monotonic()
        try:
            yield
        finally:
            self._mean_seconds += 0.1 * (time.monotonic() - started - self._mean_seconds)
            self.running -= 1
            self._next()

    async def _wait(self, client: str) -> None:
        if self.running < self.most_running and not self._lines:
            self.running += 1
            return
        if self.waiting >= self.most_waiting:
            self._make_room(client)
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # given in the same moment
                self.running -= 1
                self._next()
            else:
                self._drop(client, turn)
            raise

    def _make_room(self, client: str) -> None:
        longest = max(self._lines, key=lambda name: len(self._lines[name]), default=client)
        own = len(self._lines.get(client, ()))
        if longest == client or len(self._lines[longest]) < own + 2:
            raise QueueFull(self._retry_after())
        refused = self._lines[longest][-1]
        self._drop(longest, refused)
        refused.set_exception(QueueFull(self._retry_after()))

    def _drop(self, client: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(client)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._lines[client]

    def _next(self) -> None:
        while self._lines and self.running < self.most_running:
            client, line = next(iter(self._lines.items()))
            turn = line.popleft()
            self._lines.move_to_end(client)
            if not line:
                del self._lines[client]
            if not turn.done():
                self.running += 1
                turn.set_result(None)

    def _retry_after(self) -> int:
        return min(60, max(1, math.ceil(self.waiting * self._mean_seconds / self.most_running)))
