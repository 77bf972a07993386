"""Containers that are started ahead. Each is used once: nothing of one session can be left in the next."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from agentrl.containers.contract import Container, Containers, Spec

STARTS_AT_ONCE = 8
"""Containers that are started at the same time."""


class Pool:
    """Containers of one kind. Some stand ready; others are started when they are asked for."""

    def __init__(self, containers: Containers, spec: Spec | None, size: int) -> None:
        """`spec`: of the containers that are started ahead, `size` of them."""
        self._containers, self._spec, self._size = containers, spec, size if spec is not None else 0
        self._ready: deque[asyncio.Task[tuple[Container, float]]] = deque()
        self._turn = asyncio.Semaphore(STARTS_AT_ONCE)
        self._unused: set[asyncio.Task[None]] = set()
        self._fill()

    async def take(self, spec: Spec) -> tuple[Container, float]:
        """Return a container that nobody has used, and the seconds that its start took. Raises ContainerFailed."""
        if spec == self._spec and self._ready:
            starting = self._ready.popleft()
            self._fill()
        else:
            starting = asyncio.create_task(self._start(spec))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._give_up(starting)
            raise

    async def close(self) -> None:
        """Stop all that nobody has taken."""
        for starting in self._ready:
            self._give_up(starting)
        self._ready.clear()
        await asyncio.gather(*self._unused)

    async def _start(self, spec: Spec) -> tuple[Container, float]:
        async with self._turn:
            begun = time.monotonic()
            container = await self._containers.start(spec)
        return container, time.monotonic() - begun

    def _fill(self) -> None:
        while self._spec is not None and len(self._ready) < self._size:
            self._ready.append(asyncio.create_task(self._start(self._spec)))

    def _give_up(self, starting: asyncio.Task[tuple[Container, float]]) -> None:
        """Stop a container that nobody takes, once it has started; a start under way is ended."""
        task = asyncio.create_task(_stop(starting))
        self._unused.add(task)
        task.add_done_callback(self._unused.discard)


async def _stop(starting: asyncio.Task[tuple[Container, float]]) -> None:
    starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result()[0].stop()
