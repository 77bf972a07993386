"""Waiting for something to come about, with room for a busy machine."""

import asyncio
import time
from collections.abc import Awaitable, Callable

# Passing takes milliseconds; on two cores that other tests use, too, killing a process has taken seconds.
SECONDS = 30.0


def wait_for(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait until `condition` holds; raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not come about in {seconds:.0f} s"
        time.sleep(0.02)


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = SECONDS) -> None:
    """Wait on the event loop until `condition` holds; raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert time.monotonic() < end, f"did not come about in {seconds:.0f} s"
        await asyncio.sleep(0.02)
