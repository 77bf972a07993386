"""Batches of the queries of all requests, searched by a few threads, the clients' in turn.

Every query that is taken is answered once, with its result or with an exception. What waits is bounded, and shared by
clients: a turn goes to them one after another, and a full queue refuses the client with most in it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")

_LONGEST_WAIT = 60
_MEMORY = 0.9
"""Weight of the past in the running average of a query's seconds."""


class QueueFull(Exception):
    """More queries wait than may."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} queries are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(slots=True, eq=False)
class _Batch(Generic[A]):
    """Queries of one request. `left`: those not answered yet."""

    answers: list[A | None]
    left: int
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher(Generic[Q, A]):
    """Queue of queries and the tasks that answer them. Start it on the event loop that uses it, and close it there."""

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], list[A]],
        *,
        threads: int,
        most: int,
        max_pending: int,
        window: float = 0.0,
    ) -> None:
        """`answer` is called in threads with `most` queries at most.

        `window`: seconds that a batch waits for more queries; worth it where a batch costs little more than one query.
        """
        self._answer = answer
        self._threads = threads
        self._most = most
        self._max_pending = max_pending
        self._window = window
        self._lines: OrderedDict[str, deque[tuple[Q, int, _Batch[A]]]] = OrderedDict()
        """Waiting queries by client, the client whose turn is next first; none is empty."""
        self._waiting = 0
        """Number of queries in all lines."""
        self._there = asyncio.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="search")
        self._lanes: list[asyncio.Task[None]] = []
        self._seconds = 0.0
        self.pending = 0
        """Number of queries taken and not answered."""

    def start(self) -> None:
        """Start the tasks."""
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(self._threads)]

    async def close(self) -> None:
        """Stop. Queries not answered yet never will be."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def ask(self, queries: Sequence[Q], client: str = "") -> list[A]:
        """Wait for one answer a query. Raises QueueFull, and whatever `answer` raised."""
        if not queries:
            return []
        self._make_room(client, len(queries))
        batch: _Batch[A] = _Batch([None] * len(queries), len(queries))
        self.pending += len(queries)
        self._waiting += len(queries)
        self._lines.setdefault(client, deque()).extend((query, place, batch) for place, query in enumerate(queries))
        self._there.set()
        await batch.done
        return [answer for answer in batch.answers if answer is not None]

    def _make_room(self, client: str, wanted: int) -> None:
        """Refuse the newest requests of any client with more waiting than `client` would have. Raises QueueFull
        otherwise."""
        while self.pending + wanted > self._max_pending:
            seconds = self.pending * self._seconds / self._threads
            full = QueueFull(self.pending, min(_LONGEST_WAIT, max(1, math.ceil(seconds))))
            longest = max(self._lines, key=lambda name: len(self._lines[name]), default=client)
            own = len(self._lines.get(client, ()))
            if longest == client or len(self._lines[longest]) <= own + wanted:
                raise full
            line = self._lines[longest]
            refused = line[-1][2]
            while line and line[-1][2] is refused:
                line.pop()
                self.pending -= 1
                self._waiting -= 1
            if not line:
                del self._lines[longest]
            if not refused.done.done():
                refused.done.set_exception(full)

    def _take(self) -> list[tuple[Q, int, _Batch[A]]]:
        """Take the next queries, one of each client after another."""
        taken: list[tuple[Q, int, _Batch[A]]] = []
        while self._lines and len(taken) < self._most:
            client, line = next(iter(self._lines.items()))
            taken.append(line.popleft())
            if line:
                self._lines.move_to_end(client)
            else:
                del self._lines[client]
        self._waiting -= len(taken)
        if not self._waiting:
            self._there.clear()
        return taken

    async def _lane(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._there.wait()
            if self._window and self._waiting < self._most:
                await asyncio.sleep(self._window)
            taken = self._take()
            wanted = [item for item in taken if not item[2].done.done()]  # of requests that nobody gave up
            begun = time.perf_counter()
            try:
                if wanted:
                    answers = await loop.run_in_executor(self._pool, self._answer, [query for query, _, _ in wanted])
            except asyncio.CancelledError:
                raise
            except BaseException as caught:
                # A panic of native code is no Exception; it must end neither this lane nor the server.
                error = caught if isinstance(caught, Exception) else RuntimeError(f"{type(caught).__name__}: {caught}")
                for _, _, batch in wanted:
                    if not batch.done.done():
                        batch.done.set_exception(error)
            else:
                _settle(wanted, answers if wanted else [])
            finally:
                self.pending -= len(taken)
            if wanted:
                self._note_seconds((time.perf_counter() - begun) / len(wanted))

    def _note_seconds(self, seconds: float) -> None:
        """Update the running average of a query's seconds."""
        self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * seconds if self._seconds else seconds


def _settle(queries: Sequence[tuple[Q, int, _Batch[A]]], answers: Sequence[A]) -> None:
    """Put the answers into their batches, and wake who waits for a batch that is complete."""
    for (_, place, batch), answer in zip(queries, answers, strict=True):
        batch.answers[place] = answer
        batch.left -= 1
        if not batch.left and not batch.done.done():
            batch.done.set_result(None)
