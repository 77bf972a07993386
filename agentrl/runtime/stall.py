"""Calls of workers that take suspiciously long: which rank waits for which, and where each of them is.

The ranks' reports of themselves (`Position`) become one sentence (`report`). Ranks that share work meet in collective
calls. So of the ranks that have not answered, those inside such a call wait, and the rank outside keeps them waiting.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STALL_SECONDS = 300.0
"""Seconds after which a call is reported as long, and after which it is reported again."""
WAIT_FOR_OTHERS = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "torch.distributed.rendezvous",
)
"""Modules (and their submodules) in which a thread waits for other ranks."""
PLUMBING = ("torch._ops", "torch._library", "torch._dynamo", "torch.utils._contextlib", "contextlib")
"""Modules whose functions only call another."""
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(frozen=True, slots=True)
class Position:
    """The place in the code that a thread has reached."""

    line: str
    """The innermost line that is no library's, e.g. `agentrl/parallel/shard.py:58`, and its text."""
    inside: str
    """Python function that the line calls, e.g. `json.loads`; empty: the thread is in the line itself."""
    collective: str
    """The call of torch.distributed in which it waits for other ranks, e.g. `all_reduce`; empty: no such call."""

    def __str__(self) -> str:
        if self.collective:
            return f"{self.collective} at {self.line}"
        return f"{self.inside} at {self.line}" if self.inside else self.line


def position_of(frame: FrameType) -> Position:
    """Find the position of the thread whose innermost Python frame is `frame`."""
    frames = [found for found, _ in traceback.walk_stack(frame)]
    own = next((index for index, found in enumerate(frames) if _is_own(found)), len(frames) - 1)
    return Position(_line(frames[own]), _function(frames[own - 1]) if own else "", _collective(frames[:own]))


def report(positions: Mapping[int, Position], silent: Mapping[int, str], answered: Sequence[int] = ()) -> str:
    """Say in one sentence where the ranks are that a call has not ended on.

    `positions`: of ranks that say where they are. `silent`: the other ranks, and their known state. Silent ranks are
    named first, then ranks outside of collective calls, ranks that wait in one, and ranks that have `answered`.
    """
    same: dict[Position, list[int]] = {}
    for rank, position in sorted(positions.items()):
        same.setdefault(position, []).append(rank)
    parts = [f"rank {rank} does not say where it is ({known})" for rank, known in sorted(silent.items())]
    for position, ranks in sorted(same.items(), key=lambda item: (bool(item[0].collective), item[1])):
        several = len(ranks) > 1
        if position.collective:
            doing = f"wait{'' if several else 's'} for other ranks in"
        else:
            doing = "are in" if several else "is in"
        parts.append(f"{ranks_named(ranks)} {doing} {position}")
    if answered:
        parts.append(f"{ranks_named(answered)} {'have' if len(answered) > 1 else 'has'} answered")
    return "; ".join(parts)


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 1`; `ranks 0, 2 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class Stall:
    """Clock of one call: when to report that it takes long (every `period` seconds), and when it is over (`limit`)."""

    def __init__(self, period: float, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._period, self.limit = period, limit
        self._said = 0

    @property
    def seconds(self) -> float:
        """Since the call began."""
        return self._clock() - self._began

    @property
    def over(self) -> bool:
        return self.seconds >= self.limit

    def due(self) -> bool:
        """Return true once a period, when it is time to say that the call takes long."""
        if self.seconds < (self._said + 1) * self._period:
            return False
        self._said = int(self.seconds // self._period)
        return True

    def next(self) -> float:
        """Seconds until something is to be done."""
        return max(0.0, min(self.limit, (self._said + 1) * self._period) - self.seconds)


@contextmanager
def watched(
    what: str,
    period: float,
    say: Callable[[str], None],
    *,
    thread: int | None = None,
    seconds: Callable[[], float] | None = None,
) -> Iterator[None]:
    """Say where a thread is, from another one, each time that its `seconds` have grown by a `period`.

    Args:
        what: beginning of the sentence, before the seconds, e.g. `policy.update has taken`.
        thread: the watched thread; None: this one.
        seconds: time for which the thread has been at one thing; less than before where it is at the next. Another
            thread calls it. None: time since the block began.
    """
    ended, began = threading.Event(), time.monotonic()
    watched_thread = threading.get_ident() if thread is None else thread

    def watch() -> None:
        said = 0.0
        while not ended.wait(period / 4):
            now = time.monotonic() - began if seconds is None else seconds()
            said = min(said, now)
            if now > said + period and (frame := sys._current_frames().get(watched_thread)) is not None:
                said = now
                say(f"{what} {now:.0f} s: it is in {position_of(frame)}")

    watching = threading.Thread(target=watch, name=f"watch: {what}", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _is_own(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if _module(frame).partition(".")[0] == "agentrl":
        return True
    return not file.startswith((*LIBRARIES, "<")) and "dist-packages" not in file


def _collective(inner: Sequence[FrameType]) -> str:
    """`inner`: frames within the own line's call, the innermost first."""
    found = next((frame for frame in inner if not _is_of(frame, PLUMBING)), None)
    return found.f_code.co_name if found is not None and _is_of(found, WAIT_FOR_OTHERS) else ""


def _is_of(frame: FrameType, modules: Sequence[str]) -> bool:
    name = _module(frame)
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _function(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}"


def _line(frame: FrameType) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    parts = Path(file).parts
    shown = "/".join(parts[-min(len(parts), _module(frame).count(".") + 1) :])
    text = linecache.getline(file, number).strip()
    return f"{shown}:{number}{f', `{text}`' if text else ''}"
