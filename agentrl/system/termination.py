"""SIGTERM: where it is raised, and work that it waits for, for a bounded time.

A job that is preempted is sent SIGTERM, and killed some seconds later. By itself the signal raises `Terminated` in the
main thread wherever that is. Work that must not be left half done is put between `defer` and `allow`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM came: the process is to end as after Ctrl-C, with another exit status."""


class _State:
    """State of this process's handler; signals are handled in the main thread alone."""

    handles = False
    deferred: float | None = None
    """Seconds for which a signal waits; None: it is raised at once."""
    came: float | None = None
    """Time at which the first signal came."""
    waits = False
    """A signal that came is yet to be raised."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Have SIGTERM raise Terminated in the main thread, unless somebody handles it already."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise)
    signal.signal(signal.SIGTERM, _on_sigterm)
    _State.handles, _State.deferred, _State.came, _State.waits = True, None, None, False
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, before)
        _State.handles = False


def defer(seconds: float) -> None:
    """Have a SIGTERM that comes from now on raised by `allow`, or where the main thread is after `seconds`.

    A second one is raised at once. Without `sigterm_raises` around it this does nothing.
    """
    _State.deferred = seconds if _State.handles and seconds > 0 else None


def allow() -> None:
    """Undo `defer`; raise Terminated if a SIGTERM waits."""
    _State.deferred = None
    if _State.waits:
        _State.waits = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Terminated


@contextmanager
def within_time(seconds: float) -> Iterator[None]:
    """Raise Terminated inside when so many seconds have passed since the SIGTERM came."""
    since = 0.0 if _State.came is None else time.monotonic() - _State.came
    if _State.handles:
        signal.setitimer(signal.ITIMER_REAL, max(seconds - since, 1e-3))
    try:
        yield
    finally:
        if _State.handles:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _on_sigterm(number: int, frame: object) -> None:
    is_first = _State.came is None
    _State.came = time.monotonic() if _State.came is None else _State.came
    if _State.deferred is None or not is_first:
        _State.waits = False
        raise Terminated
    _State.waits = True
    signal.setitimer(signal.ITIMER_REAL, _State.deferred)


def _raise(number: int, frame: object) -> None:
    _State.waits = False
    raise Terminated
