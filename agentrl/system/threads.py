"""Blocking calls beside the event loop, in daemon threads.

A thread cannot be killed. When the caller stops waiting (a deadline, a cancellation) its thread runs on until the
function returns, and is counted as abandoned; daemon threads keep no process from ending. A thread a call (or, for an
object with state, a thread of its own) rather than a pool, so that calls that never return take no worker from those
that do.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.errors import InfrastructureError

T = TypeVar("T")


class AbandonedThreads(InfrastructureError):
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
            result, error = _outcome(function, args, kwargs)
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


class OwnThread:
    """One thread, in which the functions of one stateful object run in the order in which they were asked for."""

    def __init__(self, what: str) -> None:
        """The thread is started."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=what, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        """Run `function(*args, **kwargs)` behind all that was asked for before, also if nobody waits for it any more.

        SystemExit of the function becomes RuntimeError: it must not end the process.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            result, error = _outcome(function, args, kwargs)
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, error)

        self._jobs.put(job)
        return future

    def end(self) -> None:
        """Let the thread end when it has done what was asked for."""
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _outcome(
    function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[T | None, BaseException | None]:
    """What the function returned, and what it raised, as a future takes it."""
    try:
        return function(*args, **kwargs), None
    except StopIteration:
        return None, RuntimeError("StopIteration")
    except Exception as raised:
        return None, raised
    except BaseException as raised:
        return None, RuntimeError(f"{type(raised).__name__}: {raised}")


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
