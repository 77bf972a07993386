"""Circuit breaker (M. Nygard, Release It!, 2007): calls leave a server alone for a while that only fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.remote.faults import FaultKind, RemoteFault


class CircuitOpen(Exception):
    """No attempt was made: the breaker was open until the deadline."""


class CircuitBreaker:
    """Gate before the attempts at one server. Closed: attempts go through. Open, after `failures` in a row: they wait.

    After `seconds` one of them goes as a probe; its success lets all others go, its failure makes them wait again. They
    wait instead of failing at once because the caller has a deadline, and a server that restarts is back within it.
    """

    def __init__(self, failures: int, seconds: float) -> None:
        """Close the breaker, to open for `seconds` after `failures` in a row; with 0 failures it never opens."""
        self.failures, self.seconds = failures, seconds
        self.opened = 0
        """Number of times that it has opened."""
        self._in_a_row = 0
        self._open_until: float | None = None
        self._probing = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True while attempts wait."""
        return self._open_until is not None

    @asynccontextmanager
    async def attempt(self, until: float) -> AsyncIterator[None]:
        """Wait until an attempt may be made, and learn from how it ends.

        Raises CircuitOpen when the event loop's clock reaches `until` before.
        """
        try:
            async with asyncio.timeout_at(until):
                probe = await self._admitted()
        except TimeoutError:
            raise CircuitOpen from None
        try:
            yield
        except RemoteFault as fault:
            if fault.kind in (FaultKind.OVERLOADED, FaultKind.ANSWER):  # it is busy, or was asked something odd
                self._succeeded()
            else:
                self._failed(probe)
            raise
        except Exception:
            self._succeeded()  # the server answered
            raise
        except BaseException:
            if probe:
                self._change(probing=False)  # nothing is known: another one may try
            raise
        self._succeeded()

    async def _admitted(self) -> bool:
        """Wait for admission; return True when the attempt is a probe."""
        while self._open_until is not None:
            left = self._open_until - time.monotonic()
            if left <= 0 and not self._probing:
                self._probing = True
                return True
            changed = self._changed
            try:
                async with asyncio.timeout(left if left > 0 else None):
                    await changed.wait()
            except TimeoutError:
                pass
        return False

    def _succeeded(self) -> None:
        self._in_a_row = 0
        if self._open_until is not None:
            self._open_until = None
            self._change(probing=False)

    def _failed(self, probe: bool) -> None:
        self._in_a_row += 1
        if probe or (self._open_until is None and 0 < self.failures <= self._in_a_row):
            self.opened += self._open_until is None
            self._open_until = time.monotonic() + self.seconds
            self._change(probing=False)

    def _change(self, *, probing: bool) -> None:
        self._probing = probing
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
