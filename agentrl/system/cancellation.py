"""Cancellation by request, and cancellation that leaks out of an awaited object.

A task that awaits a cancelled future, or a library that cancels a scope of its own, raises CancelledError although
nobody cancelled the task. Taken for a cancellation, such an error would end the task without a word to its waiters.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from agentrl.errors import InfrastructureError


def is_being_cancelled() -> bool:
    """Check whether the running task was asked to end; false where no task runs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0


class leaked_cancellation_fails:
    """Context that raises InfrastructureError in place of a CancelledError that nobody asked the running task for."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError) and not is_being_cancelled():
            raise InfrastructureError(f"{self._what}: something that it waited for was cancelled") from error
