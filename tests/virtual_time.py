"""Tests on a clock of their own: where nothing is ready to run, the time of the next timer comes at once.

For code that waits on the event loop alone: a thread or a socket would be waited for while the clock jumps.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import ParamSpec

P = ParamSpec("P")


class _Selector(selectors.DefaultSelector):
    def __init__(self, slept: Callable[[float], None]) -> None:
        super().__init__()
        self._slept = slept

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()
        if not (ready := super().select(0)):
            self._slept(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose time passes by timers and by `passes` alone."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self.passes))

    def time(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        """Let time pass, as for code that holds the loop."""
        self.now += seconds


def passes(seconds: float) -> None:
    """Let time pass on the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.passes(seconds)


def virtual_time(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test on a `VirtualLoop`."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(whole())

    return run
