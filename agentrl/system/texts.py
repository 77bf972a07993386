"""Text files that a config names, read here and on machines that have no such file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_read: dict[str, str] = {}
"""Texts that were read, by the paths that configs give."""
_taken: dict[str, str] = {}
"""Texts to use in place of files, by the same paths."""


def read_text(path: str | Path) -> str:
    """Read a file, or return the text that `take_files` was given for its path: all processes of a run have the same.

    Raises OSError, UnicodeDecodeError.
    """
    name = str(path)
    _read[name] = text = _taken[name] if name in _taken else Path(name).read_text(encoding="utf-8")
    return text


def is_there(path: str | Path) -> bool:
    """Check whether `read_text` finds a file."""
    return str(path) in _taken or Path(path).is_file()


def loaded_files() -> dict[str, str]:
    """Return all texts that were read: for `take_files` elsewhere."""
    return {**_taken, **_read}


def take_files(texts: Mapping[str, str]) -> None:
    """Use these texts in place of the files that a config names, on a machine that may not have them."""
    _taken.update(texts)
