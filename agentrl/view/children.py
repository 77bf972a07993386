"""Child processes that answer requests; the kernel ends a child when a request takes too much time or memory.

Both sides write lines of JSON. A child serves many requests, as starting one takes a second; an ended child is replaced
by the next request. A child that hangs is ended by its own clock, without help from outside.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

import orjson

from agentrl.errors import UserError
from agentrl.system.json_value import JSON

MOST = 3
"""Requests that are answered at once; further ones wait."""
GRACE = 2.0
"""Seconds from a request's time limit, at which its child is to stop by itself, to its end by the kernel."""
BYTES = 2 << 30
"""Memory of a child; 0.14 GB of it are the libraries'."""
Said: TypeAlias = dict[str, JSON]
Answering: TypeAlias = Callable[[Said], Iterable[Mapping[str, object]]]
LAST: Said = {"last": True}


class Ended(Exception):
    """A child ended before it had answered."""

    def __init__(self, status: int) -> None:
        self.is_late = status == -signal.SIGALRM
        """The time was over; otherwise it was the memory, as a rule."""
        super().__init__(f"the process ended with status {status}")


class Children:
    """Processes of one module, whose main function is `answer_all`."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._places = threading.BoundedSemaphore(MOST)
        self._idle: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)

    def ready(self) -> None:
        """Start one beforehand, without waiting for it."""
        self._idle.append(self._start())

    def ask(self, request: Mapping[str, object], seconds: float) -> Iterator[Said]:
        """Yield a child's answers to a request. Raises Ended, and UserError where no child is free for too long."""
        if not self._places.acquire(timeout=seconds):
            raise UserError(f"{MOST} questions are being answered: wait for one of them, and ask again")
        child = None
        try:
            child = self._take()
            yield from _said(child, orjson.dumps({**request, "seconds": seconds, "end": seconds + GRACE}))
            self._idle.append(child)
            child = None
        finally:
            self._places.release()
            if child is not None:
                _end(child)

    def _take(self) -> subprocess.Popen[bytes]:
        with suppress(IndexError):
            while (child := self._idle.pop()).poll() is not None:
                _end(child)
            return child
        return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # Arrow's own allocator would take a GiB of the limit before anything is read.
        environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
        return subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C is the parent's, whose end closes the pipe
        )

    def close(self) -> None:
        """End the children that wait for a request."""
        while self._idle:
            _end(self._idle.pop())


def _said(child: subprocess.Popen[bytes], request: bytes) -> Iterator[Said]:
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(request + b"\n")
        child.stdin.flush()
    except BrokenPipeError as error:
        raise Ended(child.wait()) from error
    while (line := child.stdout.readline()).endswith(b"\n"):
        if (said := orjson.loads(line)) == LAST:
            return
        if "fault" in said:
            raise RuntimeError(f"the child process met a fault of its own:\n{said['fault']}")
        yield said
    raise Ended(child.wait())


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()  # closes its pipes, and waits


def answer_all(answer: Answering) -> None:
    """Answer requests in a child process until there are no more, or one takes too much; yielded lines are sent."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, wherever it is
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM,))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    most = BYTES if most == resource.RLIM_INFINITY else min(most, BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with os.fdopen(os.dup(1), "wb") as said:
        for number in (1, 2):  # the last words of libraries that give up
            os.dup2(nowhere, number)
        for line in sys.stdin.buffer:
            request: Said = orjson.loads(line)
            signal.setitimer(signal.ITIMER_REAL, float(str(request["end"])))
            for one in _told(answer, request):
                said.write(orjson.dumps(one, default=str) + b"\n")
                said.flush()
            signal.setitimer(signal.ITIMER_REAL, 0)


def _told(answer: Answering, request: Said) -> Iterator[Mapping[str, object]]:
    try:
        yield from answer(request)
    except MemoryError:
        sys.exit(1)
    except Exception:
        yield {"fault": traceback.format_exc()}
    yield LAST
