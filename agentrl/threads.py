"""Blocking calls beside the event loop, in daemon threads.

A thread cannot be killed. When the caller stops waiting (a deadline, a cancellation) its thread runs on until the
function returns, and is counted as abandoned; daemon threads keep no process from ending. A thread a call rather than
a pool, so that calls that never return take no worker from those that do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class AbandonedThreads(RuntimeError):
    """Too many earlier calls were given up and still run."""


class DaemonThreads:
    """Runs blocking functions in threads and refuses to when `max_abandoned` given-up calls still run."""

    def __init__(self, what: str, max_abandoned: int = 256) -> None:
        self.what = what
        self.max_abandoned = max_abandoned
        self.abandoned = 0
        self._lock = threading.Lock()

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Wait for `function(*args, **kwargs)` in a new thread. Its exceptions are raised here.

        Raises AbandonedThreads. SystemExit of the function becomes RuntimeError: it must not end the process.
        """
        if self.abandoned >= self.max_abandoned:
            raise AbandonedThreads(
                f"{self.abandoned} calls of {self.what} that were given up are still running in their threads"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        ended = False

        def work() -> None:
            nonlocal ended
            result: Any = None
            error: BaseException | None = None
            try:
                result = function(*args, **kwargs)
            except Exception as raised:
                # A future refuses StopIteration.
                error = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
            except BaseException as raised:
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            with self._lock:
                ended = True
                if future.cancelled():
                    self.abandoned -= 1
                    return
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the event loop is closed: nobody waits any more

        threading.Thread(target=work, name=self.what, daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                if not ended:
                    future.cancel()
                    self.abandoned += 1
            raise


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
