"""An event loop in a thread of its own, for code that is not asynchronous itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

HURRIED_SECONDS = 5.0
"""Time that the loop has for each further call (closing) after a second interrupt, before it is given up."""


class LoopThread:
    """An event loop that lives from construction to `close`, so that tasks may outlive a single `run`.

    Unlike `asyncio.Runner` it works where the calling thread runs an event loop already (a notebook), and tasks
    continue while the calling thread does something else.
    """

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`around()` is entered in the thread for its whole life; `run` raises its errors."""
        self._around = around
        self._loop = asyncio.new_event_loop()
        self._running: set[_Running[object]] = set()
        self._error: BaseException | None = None
        self._ending = self._hurried = self._given_up = False
        # Daemon: a loop that was given up must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, None, T]) -> T:
        """Run `work` on the loop and wait for it. Returns its result, or raises its exception.

        An exception of a signal handler in the waiting thread (KeyboardInterrupt) cancels `work` and is raised once
        `work` has ended; a second one is raised at once. SystemExit or KeyboardInterrupt of any other task on the loop
        cancels `work`, too, and is raised here, or by the next `run` when no `run` waits.

        Raises RuntimeError on the loop's own thread, where waiting would never end.
        """
        running = _Running(work)
        try:
            if threading.current_thread() is self._thread:
                raise RuntimeError(f"thread {self._thread.name} would wait for itself")
            if self._given_up:
                raise KeyboardInterrupt
            self._loop.call_soon_threadsafe(self._begin, running)
            if not self._hurried:
                return running.outcome.result()
            concurrent.futures.wait([running.outcome], HURRIED_SECONDS)
            if running.outcome.done():
                return running.outcome.result()
            self._given_up = True
            raise KeyboardInterrupt
        except BaseException:
            if not running.outcome.done():  # not an exception of `work`
                self._interrupt(running)
            raise

    @property
    def thread(self) -> int:
        """Identifier of the thread that the loop runs on."""
        assert self._thread.ident is not None
        return self._thread.ident

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have the loop call `function` soon. Safe from any thread."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel all tasks, wait until they have ended, and end the thread."""
        if self._loop.is_closed():
            return
        try:
            if not self._given_up:
                self.run(_end_all())
        finally:
            self._ending = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            if not self._given_up:
                self._thread.join()
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _interrupt(self, running: _Running[T]) -> None:
        """Cancel `running`, and wait until it has ended or another interrupt comes."""
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            running.cancel()
            return
        self._loop.call_soon_threadsafe(running.cancel)
        if self._hurried:
            return
        try:
            concurrent.futures.wait([running.outcome])
        except BaseException:
            self._hurried = True
            raise

    def _begin(self, running: _Running[object]) -> None:
        if self._given_up:
            running.cancel()
            return
        self._running.add(running)
        running.task = self._loop.create_task(running.work)
        running.task.add_done_callback(running.settle)
        running.outcome.add_done_callback(lambda _: self._running.discard(running))
        if self._error is not None:
            self._fail(self._error)

    def _fail(self, error: BaseException) -> None:
        """Have all waiting `run` calls raise `error`, or the next `run`."""
        self._error = None if self._running else error
        for running in list(self._running):
            running.error = error
            running.cancel()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with self._around():
                self._run_until_end()
        except BaseException as error:
            self._error = error
            self._run_until_end()  # for waiting `run` calls, and to close

    def _run_until_end(self) -> None:
        while not self._ending:
            try:
                self._loop.run_forever()
            except BaseException as error:  # asyncio lets SystemExit and KeyboardInterrupt of any task through
                self._fail(error)


class DelayWatch:
    """Longest delay of an event loop's callbacks past their due time, a sign that something blocked the loop.

    All methods but `late` run on the loop's thread.
    """

    SECONDS = 0.05
    """Time between two looks, by default."""

    def __init__(self, interval: float = SECONDS) -> None:
        """`interval`: seconds between two looks; shorter blocks of the loop may be missed."""
        self._interval = interval
        self._longest = 0.0
        self._due: float | None = None

    def begin(self) -> None:
        """Look from now on, as long as the loop runs."""
        self._due = None
        self._look()

    def take(self) -> float:
        """Return the longest delay since the last call, in seconds; a delay that lasts still counts."""
        longest, self._longest = max(self._longest, self.late()), 0.0
        return longest

    def late(self) -> float:
        """Return the seconds by which the loop is late now. Safe from any thread."""
        due = self._due
        return 0.0 if due is None else max(0.0, time.monotonic() - due)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._longest = max(self._longest, self.late())
        self._due = now + self._interval
        loop.call_at(self._due, self._look)


@dataclass(slots=True, eq=False)
class _Running(Generic[T_co]):
    """A running coroutine, and the outcome that the waiting thread receives. All methods run on the loop's thread."""

    work: Coroutine[object, None, T_co]
    outcome: concurrent.futures.Future[T_co] = field(default_factory=concurrent.futures.Future)
    error: BaseException | None = None
    """Raised in place of the result of `work`."""
    task: asyncio.Task[T_co] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
        elif not self.outcome.done():  # the interrupt came before `work` began
            self.work.close()
            self.outcome.set_exception(asyncio.CancelledError())

    def settle(self, task: asyncio.Task[T_co]) -> None:
        # CancelledError is no exception of a task, and the class of asyncio differs from the one in concurrent.futures.
        raised = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self.error is not None or raised is not None:
            self.outcome.set_exception(self.error or raised)
        else:
            self.outcome.set_result(task.result())


def run_apart(name: str, work: Coroutine[object, None, T]) -> T:
    """Run `work` on an event loop of its own, in place of asyncio.run: a notebook's loop runs in the calling thread."""
    with LoopThread(name) as loop:
        return loop.run(work)


async def _end_all() -> None:
    """Cancel all other tasks and wait for them, then for asynchronous generators and the default executor."""
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            loop.call_exception_handler({"message": "a task failed while its loop was closed", "exception": ended})
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
