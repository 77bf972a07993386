"""Deadlines of single calls that the code inside can see, and that stand still while it waits in a queue.

Code under a deadline can then give up in good order, and pass its remaining time to a server.

A trajectory's deadline is a plain `asyncio.timeout` on purpose: it bounds how long one trajectory may hold up its step,
waits for a queue included. If this module saw that deadline, it would cut a call short. The cut call would count as a
fault of the server, and the trajectory would be tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar, Token
from types import TracebackType


class within:
    """Deadline that `seconds_left` and `paused_deadlines` inside it can see: `async with within(seconds)`."""

    __slots__ = ("_end", "_left", "_outer", "_running", "_timeout", "_token", "_waiting")
    _token: Token[within | None]

    def __init__(self, seconds: float) -> None:
        self._outer = _innermost.get()
        self._timeout = asyncio.timeout(seconds)
        self._end = asyncio.get_running_loop().time() + seconds
        self._left = seconds
        """Seconds left when the clock was stopped; valid while `_waiting` is not 0."""
        self._waiting = 0
        """Number of waits inside; the clock resumes when the last of them ends."""
        self._running = True

    async def __aenter__(self) -> asyncio.Timeout:
        self._token = _innermost.set(self)
        return await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = False
        _innermost.reset(self._token)
        await self._timeout.__aexit__(kind, error, trace)

    def _seconds_left(self) -> float:
        """Return the seconds left of this deadline and those around it."""
        own = self._left if self._waiting else self._end - asyncio.get_running_loop().time()
        return own if self._outer is None else min(own, self._outer._seconds_left())

    def _stop(self) -> None:
        self._waiting += 1
        if self._waiting == 1:
            self._left = self._end - asyncio.get_running_loop().time()
            self._reschedule(None)

    def _resume(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._end = asyncio.get_running_loop().time() + self._left
            self._reschedule(self._end)

    def _reschedule(self, when: float | None) -> None:
        # A wait inside may outlast the block, in a task of its own; asyncio refuses to move a deadline that is over.
        if self._running and not self._timeout.expired():
            self._timeout.reschedule(when)


_innermost: ContextVar[within | None] = ContextVar("agentrl_deadline", default=None)


def seconds_left(default: float) -> float:
    """Return the seconds until the nearest deadline around the caller; `default` without one. Never below 0."""
    innermost = _innermost.get()
    return default if innermost is None else max(0.0, innermost._seconds_left())


@contextlib.contextmanager
def paused_deadlines() -> Iterator[None]:
    """Stop the clocks of all `within` around the caller: waiting in a queue does not count.

    The code inside needs an end of its own. `seconds_left` stays what it is.
    """
    stopped: list[within] = []
    one = _innermost.get()
    while one is not None:
        one._stop()
        stopped.append(one)
        one = one._outer
    try:
        yield
    finally:
        for one in stopped:
            one._resume()


class Clock:
    """Clock of deadlines that can be stopped for all of them at once. Its methods are called on one event loop."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Timeout, float] = {}
        """Seconds left of each deadline when the clock was stopped."""
        self._is_stopped = False

    @contextlib.asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Be `asyncio.timeout(seconds)` on this clock."""
        async with asyncio.timeout(None if self._is_stopped else seconds) as timeout:
            self._left[timeout] = seconds
            try:
                yield timeout
            finally:
                del self._left[timeout]

    def stop(self) -> None:
        """Let no deadline pass until `resume`."""
        if self._is_stopped:
            return
        self._is_stopped, now = True, asyncio.get_running_loop().time()
        for timeout in self._left:
            when = timeout.when()
            if when is not None and not timeout.expired():
                self._left[timeout] = when - now
                timeout.reschedule(None)

    def resume(self) -> None:
        """Give each deadline the time that it had left at `stop`."""
        if not self._is_stopped:
            return
        self._is_stopped, now = False, asyncio.get_running_loop().time()
        for timeout, left in self._left.items():
            if not timeout.expired():
                timeout.reschedule(now + left)
