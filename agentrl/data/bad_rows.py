"""Rows that cannot be used: each is refused with its place, or counted and left out (`data.on_bad_row`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from agentrl.errors import DataError

OnBadRow = Literal["error", "skip", "learn"]


class BadRow(DataError):
    """A fault of a row: the place in it, and the problem. Who reads the file puts file and row before the place."""

    def __init__(self, place: str, problem: str) -> None:
        """`place`: empty for the whole row, else e.g. `column prompt, message 2`."""
        super().__init__(place, problem)
        self.place, self.problem = place, problem

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}".removeprefix(": ")


class Overlong(BadRow):
    """A row that is too long, which data.truncation judges, not data.on_bad_row."""


def located(outer: str, fault: DataError) -> BadRow:
    """Put the place around a fault before the fault's own place."""
    if not isinstance(fault, BadRow):
        return BadRow(outer, str(fault))
    fault.place = f"{outer}, {fault.place}".removesuffix(", ")
    return fault


@contextmanager
def placed(outer: str) -> Iterator[None]:
    """Put the place around faults of the block before their own."""
    try:
        yield
    except DataError as fault:
        raise located(outer, fault) from None


class BadRows:
    """The rows of a data set that cannot be used."""

    def __init__(self, on_bad_row: OnBadRow | None) -> None:
        """None: such rows are always refused."""
        self._on_bad_row = on_bad_row
        self.count = 0
        self.first = ""
        """The fault of the first row that was left out, with its place."""

    def add(self, fault: DataError) -> None:
        """Count a row, whose fault names its place. Raises DataError where such rows are refused."""
        if self._on_bad_row is None or isinstance(fault, Overlong):
            raise fault
        if self._on_bad_row != "skip":
            raise DataError(f"{fault}. Or leave such rows out, counted, with data.on_bad_row=skip") from fault
        self.count += 1
        self.first = self.first or str(fault)

    def told(self, files: str = "") -> str:
        """Write the warning, which may name the files; empty without such rows."""
        rows = f"{self.count} rows of {files}" if files else f"{self.count} rows"
        return f"{rows} cannot be used, and are left out. The first: {self.first}" if self.count else ""
