"""Paths that a row or another file names."""

from __future__ import annotations

from pathlib import PurePosixPath

LONGEST = 1024
"""Characters of a path."""


def file_below(path: object) -> str | None:
    """Return the plain form of a path that leads to a file below a folder, as `a/b` of `./a//b`; None for another."""
    if not isinstance(path, str) or len(path) > LONGEST or "\0" in path:
        return None
    pure = PurePosixPath(path)
    return None if pure.is_absolute() or ".." in pure.parts or not pure.name else str(pure)
