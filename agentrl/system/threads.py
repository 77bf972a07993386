"""Blocking calls outside the event loop, in daemon threads.

A thread cannot be killed. When the caller stops waiting (a deadline, a cancellation), its thread runs until the
function returns, and is counted as abandoned. Daemon threads keep no process from ending. Each call (or, for an object
with state, each object) has a thread of its own rather than one of a pool. Calls that never return therefore take no
worker from other calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from agentrl.errors import InfrastructureError

P = ParamSpec("P")
T = TypeVar("T")
LONG_TEXT = 16_384
"""Characters of a text from which on it is encoded outside the event loop. As many take about the 5 ms that the
interpreter leaves a thread before another one may run. With fewer the event loop would stand still as long."""


class AbandonedThreads(InfrastructureError):
    """Too many earlier calls were given up and still run."""


class DaemonThreads:
    """Runner of blocking functions in new threads; refuses when `max_abandoned` given-up calls still run."""

    def __init__(self, what: str, max_abandoned: int = 256) -> None:
        self.what = what
        self.max_abandoned = max_abandoned
        self.abandoned = 0
        self._lock = threading.Lock()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait for `function(*args, **kwargs)` in a new thread. Its exceptions are raised here.

        Raises AbandonedThreads. SystemExit of the function becomes RuntimeError: it must not end the process.
        """
        if self.abandoned >= self.max_abandoned:
            raise AbandonedThreads(
                f"{self.abandoned} calls of {self.what} that were given up are still running in their threads"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        ended = is_abandoned = False

        def work() -> None:
            nonlocal ended
            outcome = _outcome(partial(function, *args, **kwargs))
            with self._lock:
                ended = True
                if is_abandoned:  # a future that is cancelled may not be counted yet
                    self.abandoned -= 1
                    return
            try:
                loop.call_soon_threadsafe(_settle, future, outcome)
            except RuntimeError:
                return  # the event loop is closed: nobody waits any more

        threading.Thread(target=work, name=self.what, daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                if not ended:
                    is_abandoned = True
                    self.abandoned += 1
            raise


class OwnThread:
    """One thread that runs the functions of one stateful object in the order in which they were submitted."""

    def __init__(self, what: str) -> None:
        """Start the thread, named `what`."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=what, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run `function(*args, **kwargs)` after all that was submitted before, even if nobody waits for it any more.

        SystemExit of the function becomes RuntimeError: it must not end the process.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            outcome = _outcome(partial(function, *args, **kwargs))
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, outcome)

        self._jobs.put(job)
        return future

    def end(self) -> None:
        """Let the thread end once it has run all submitted work."""
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(frozen=True, slots=True)
class _Raised:
    """Exception of a function, in a form that a future takes."""

    error: BaseException


_LONG_TEXTS = DaemonThreads("work on long texts")


async def beside_loop(size: int, work: Callable[[], T]) -> T:
    """Return `work()`, called in a thread where its texts have at least LONG_TEXT characters.

    The event loop continues meanwhile. `work` must change nothing that others read: a caller that is cancelled leaves
    it running.
    """
    return work() if size < LONG_TEXT else await _LONG_TEXTS.run(work)


def _outcome(function: Callable[[], T]) -> T | _Raised:
    """Call the function; return its result or the exception."""
    try:
        return function()
    except StopIteration:
        return _Raised(RuntimeError("StopIteration"))
    except Exception as raised:
        return _Raised(raised)
    except BaseException as raised:
        return _Raised(RuntimeError(f"{type(raised).__name__}: {raised}"))


def _settle(future: asyncio.Future[T], outcome: T | _Raised) -> None:
    if future.done():
        return
    if isinstance(outcome, _Raised):
        future.set_exception(outcome.error)
    else:
        future.set_result(outcome)
