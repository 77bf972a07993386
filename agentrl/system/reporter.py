"""Contract of the object to which parts of a run report their progress and messages for the user."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Progress(Protocol):
    """A stretch of work whose progress is shown."""

    def advance(self, count: int = 1, **values: float) -> None:
        """Count `count` more units as done, and show `values` next to them. Safe from any thread."""
        ...


class Reporter(Protocol):
    """Receiver of progress, notes and warnings: the display, or in another process a buffer for it."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Progress]:
        """Enter a stage of `total` units."""
        ...

    def note(self, text: str) -> None:
        """Show `text` to the user."""
        ...

    def warn(self, text: str) -> None:
        """Warn the user of `text`."""
        ...
