"""Cancellation by request, one that leaks out of an awaited object, and one that meets the start of a process.

A task that awaits a cancelled future, or a library that cancels a scope of its own, raises CancelledError although
nobody cancelled the task. Taken for a cancellation, such an error would end the task without a word to its waiters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from agentrl.errors import InfrastructureError

T = TypeVar("T")


async def completed(starting: Awaitable[T], undo: Callable[[T], object]) -> T:
    """Start a process to the end, also where the task is cancelled meanwhile; the process is then undone.

    asyncio's own start of a process waits for ever where it is cancelled before the pipes are connected.
    """
    task = asyncio.ensure_future(starting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        undo(await task)
        raise


def is_being_cancelled() -> bool:
    """Check whether the running task was asked to end; false where no task runs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0


@contextmanager
def leaked_cancellation_fails(what: str) -> Iterator[None]:
    """Raise InfrastructureError in place of a CancelledError that nobody asked the running task for."""
    try:
        yield
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise InfrastructureError(f"{what}: something that it waited for was cancelled") from error
