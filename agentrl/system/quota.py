"""Limits on how many calls run at once and begin in a second, and concurrent runs of many coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import TypeVar

from aiolimiter import AsyncLimiter

T = TypeVar("T")


class Quota:
    """Limit on concurrency and rate: `async with quota as seconds:` waits for a place, then for its turn.

    `seconds` is how long that took. A quota belongs to the event loop in which it is first waited for.
    """

    def __init__(self, max_concurrent: int | None = None, max_rate: float | None = None) -> None:
        """Set the limits; None: no limit.

        `max_rate`: calls a second, on average; as many may begin at once (one, where it is below 1).
        """
        self._limits = max_concurrent, max_rate
        self._places = asyncio.Semaphore(max_concurrent) if max_concurrent is not None else None
        self._rate = AsyncLimiter(max(max_rate, 1.0), max(1.0, 1.0 / max_rate)) if max_rate is not None else None

    def fresh(self) -> Quota:
        """Make a quota with the same limits for another event loop."""
        return Quota(*self._limits)

    async def __aenter__(self) -> float:
        begun = None
        if self._places is not None:
            if self._places.locked():
                begun = time.perf_counter()
            await self._places.acquire()
        try:
            if self._rate is not None:
                begun = begun or time.perf_counter()
                await self._rate.acquire()
        except BaseException:
            if self._places is not None:
                self._places.release()
            raise
        return 0.0 if begun is None else time.perf_counter() - begun

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._places is not None:
            self._places.release()


async def run_concurrently(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Run all coroutines at once and return their results in order.

    Raises the first error, after the others have been cancelled and have ended.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
