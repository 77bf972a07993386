"""The moment of a cell's fault, on the disk, so that every process sees it and it happens once."""

from __future__ import annotations

import time
from pathlib import Path


def mark(folder: Path) -> bool:
    """Take down that the fault happens now; False where it has happened."""
    try:
        with (folder / "fault").open("x") as file:
            file.write(repr(time.monotonic()))
    except FileExistsError:
        return False
    return True


def marked(folder: Path) -> float | None:
    """Read when the fault happened, on the machine's monotonic clock; None: it has not, or not whole."""
    try:
        return float((folder / "fault").read_text())
    except (FileNotFoundError, ValueError):
        return None
