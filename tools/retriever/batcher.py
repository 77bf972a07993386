"""Queries of all requests, searched in batches by a few threads.

Every query that is taken is answered once, with its result or with an exception. What waits is bounded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")

_LONGEST_WAIT = 60
_MEMORY = 0.9
"""Of the running average of a query's seconds."""


class QueueFull(Exception):
    """More queries wait than may."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} queries are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(slots=True)
class _Batch(Generic[A]):
    """The queries of one request. `left`: those not answered yet."""

    answers: list[A | None]
    left: int
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher(Generic[Q, A]):
    """Start it on the event loop that uses it, and close it there."""

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
        self._waiting: deque[tuple[Q, int, _Batch[A]]] = deque()
        self._there = asyncio.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="search")
        self._lanes: list[asyncio.Task[None]] = []
        self._seconds = 0.0
        self.pending = 0
        """Queries taken and not answered."""

    def start(self) -> None:
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(self._threads)]

    async def close(self) -> None:
        """Queries not answered yet never will be."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def ask(self, queries: Sequence[Q]) -> list[A]:
        """One answer a query. Raises QueueFull, and whatever `answer` raised."""
        if not queries:
            return []
        if self.pending + len(queries) > self._max_pending:
            seconds = self.pending * self._seconds / self._threads
            raise QueueFull(self.pending, min(_LONGEST_WAIT, max(1, math.ceil(seconds))))
        batch: _Batch[A] = _Batch([None] * len(queries), len(queries))
        self.pending += len(queries)
        self._waiting.extend((query, place, batch) for place, query in enumerate(queries))
        self._there.set()
        await batch.done
        return [answer for answer in batch.answers if answer is not None]

    async def _lane(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._there.wait()
            if self._window and len(self._waiting) < self._most:
                await asyncio.sleep(self._window)
            taken = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            if not self._waiting:
                self._there.clear()
            wanted = [item for item in taken if not item[2].done.done()]  # of requests that nobody gave up
            begun = time.perf_counter()
            try:
                if wanted:
                    answers = await loop.run_in_executor(self._pool, self._answer, [query for query, _, _ in wanted])
            except Exception as error:
                for _, _, batch in wanted:
                    if not batch.done.done():
                        batch.done.set_exception(error)
            else:
                for (_, place, batch), answer in zip(wanted, answers if wanted else [], strict=True):
                    batch.answers[place] = answer
                    batch.left -= 1
                    if not batch.left and not batch.done.done():
                        batch.done.set_result(None)
            finally:
                self.pending -= len(taken)
            if wanted:
                seconds = (time.perf_counter() - begun) / len(wanted)
                self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * seconds if self._seconds else seconds
