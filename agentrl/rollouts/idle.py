"""Time in which an engine has nothing to do."""

from __future__ import annotations

import asyncio
import time

from agentrl.engines.contract import RolloutEngine


class IdleWatch:
    """Seconds in which an engine was held or ran no request, by looking at it again and again; on the event loop."""

    SECONDS = 0.1
    """Time between two looks."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.total = 0.0
        """Seconds since `begin`. Safe from any thread."""
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look from now on, as long as the loop runs; every later call does nothing."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self.SECONDS)
            now, health = time.monotonic(), await self._engine.health()
            if health.paused or not health.running:
                self.total += now - before
            before = now
