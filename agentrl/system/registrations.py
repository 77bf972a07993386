"""Names that code of a config registers: they end with the run, and come again with the code that made them.

A name that a script or a notebook registers itself, with no config in between, stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One name that code of a config registered."""

    table: MutableMapping[str, object]
    name: str
    value: object
    modules: frozenset[str]
    """Modules that were being loaded, and the one whose code called; none for a name that a config's file gave."""


_CONFIG = ""
_loading: list[str] = []
"""Modules of a config that are being loaded, the innermost last."""
_made: list[_Entry] = []
"""Entries of open runs, and of configs that were read since the last one."""
_ended: list[_Entry] = []
"""Entries of runs that have ended."""
_open: list[int] = []
"""For each open run the number of entries that were there before it."""


def enter(table: MutableMapping[str, T], name: str, value: T) -> None:
    """Set `table[name]`, as the code that calls asks for."""
    table[name] = value
    if _loading:
        modules = () if _loading[-1] == _CONFIG else (*_loading, _caller())
        _made.append(_Entry(cast(MutableMapping[str, object], table), name, value, frozenset(modules)))


def _caller() -> str:
    """Return the module of the innermost code that is not this package's."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "agentrl":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


@contextmanager
def of_config() -> Iterator[None]:
    """Register names that a config's file itself gives: they do not come again with code."""
    _loading.append(_CONFIG)
    try:
        yield
    finally:
        _loading.pop()


@contextmanager
def loading(module: str) -> Iterator[None]:
    """Load a module that a config names. What it registered in an earlier run is registered again.

    A module runs once in a process, so its own calls do not come again.
    """
    _loading.append(module)
    try:
        yield
        for entry in [one for one in _ended if module in one.modules]:
            _ended.remove(entry)
            if entry.name not in entry.table:
                entry.table[entry.name] = entry.value
                _made.append(entry)
    finally:
        _loading.pop()


@contextmanager
def of_one_run() -> Iterator[None]:
    """End the names that code of configs registers inside; the outermost run ends those of configs read before it."""
    _open.append(len(_made) if _open else 0)
    try:
        yield
    finally:
        first = _open.pop()
        for entry in reversed(_made[first:]):
            if entry.table.get(entry.name) is entry.value:
                del entry.table[entry.name]
                if entry.modules:
                    _ended.append(entry)
        del _made[first:]
