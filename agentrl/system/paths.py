"""Paths that a row or another file names."""

from __future__ import annotations

from pathlib import PurePosixPath

LONGEST = 1024
"""Characters of a path."""
LONGEST_PART = 255
"""Bytes of a file's or folder's name, as file systems have it."""


def file_below(path: object) -> str | None:
    """Return the plain form of a path that leads to a file below a folder, as `a/b` of `./a//b`; None for another."""
    if not isinstance(path, str) or len(path) > LONGEST or "\0" in path:
        return None
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.name:
        return None
    is_long = any(len(part.encode(errors="replace")) > LONGEST_PART for part in pure.parts)
    return None if is_long else str(pure)
