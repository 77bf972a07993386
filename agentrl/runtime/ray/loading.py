"""Progress of models that ranks load: counted by each rank, and shown by the driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING

from ray.exceptions import RayError

if TYPE_CHECKING:
    from agentrl.system.reporter import Progress, Reporter

logger = logging.getLogger(__name__)
LOOK_EVERY = 0.5
"""Seconds between two questions to a rank."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Progress of a bar of a rank."""

    number: int
    """Number of the bar in this rank."""
    name: str
    done: int
    total: int | None


class Loading:
    """The newest bar of a rank. Implements `Reporter` and `Progress`."""

    def __init__(self) -> None:
        self.newest: Loaded | None = None
        """None before the first bar."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Loading]:
        number = 0 if self.newest is None else self.newest.number + 1
        self.newest = Loaded(number, name, 0, total)
        yield self

    def advance(self, count: int = 1, **values: float) -> None:
        assert self.newest is not None, "a stage was entered"
        self.newest = Loaded(self.newest.number, self.newest.name, self.newest.done + count, self.newest.total)

    def note(self, text: str) -> None:
        logger.info("%s", text)

    def warn(self, text: str) -> None:
        logger.warning("%s", text)


@contextmanager
def loading_shown(reporter: Reporter | None, ask: Callable[[], Loaded | None]) -> Iterator[None]:
    """Show what a rank loads as stages, inside the block.

    ask: asks the rank for its progress. A rank that does not answer (RayError) is passed over: the call that has it
    load says what happened.
    """
    if reporter is None:
        yield
        return
    over = Event()

    def look() -> None:
        shown, progress = Loaded(-1, "", 0, None), None
        with ExitStack() as stack:
            while not over.wait(LOOK_EVERY):
                try:
                    found = ask()
                except RayError:
                    continue
                if found is None:
                    continue
                if found.number != shown.number:
                    stack.close()
                    progress = stack.enter_context(reporter.stage(found.name, found.total))
                    shown = Loaded(found.number, found.name, 0, found.total)
                _advance(progress, found.done - shown.done)
                shown = found

    thread = Thread(target=look, name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _advance(progress: Progress | None, count: int) -> None:
    if progress is not None and count:
        progress.advance(count)
