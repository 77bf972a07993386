"""Weights that several readers take from the ranks together, so that each part is gathered once for all of them.

The first rank keeps `Readers`: the readers, their positions, and which of them must wait. Every rank keeps `Parts`: its
pieces of the parts that some reader has not taken yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl.errors import TrainingError

T = TypeVar("T")

HELD_FOR = 330.0
"""Seconds after which others wait no longer for a reader that takes no more weights.

More than a server may take for one bucket: a worker whose server hangs there continues without that server.
"""
JOIN_WITHIN = 1.0
"""Seconds that a reading waits for as many readers as are expected."""
AHEAD = 2
"""Parts that the fastest reader may be ahead of the slowest."""


class LostTurn(TrainingError):
    """The reading is over that a reader asked for: later parts belong to another reading."""

    def __init__(self) -> None:
        super().__init__(f"a reader that takes no weights for {HELD_FOR:g} s, or takes old ones, has to go")


@dataclass(frozen=True, slots=True)
class Turn:
    """Permission to take a part."""

    reading: int
    """Number of the reading; a later one has a larger number."""
    least: int
    """Number of the first part that some reader has not taken."""


@dataclass(slots=True)
class Readers:
    """Readers of one role's weights, who begin together and stay together."""

    now: Callable[[], float] = time.monotonic
    """Clock, in seconds."""
    _role: str = ""
    _reading: int = 0
    _opened: float = 0.0
    _asked: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By reader, the part that it asked for last, as it has all before, and when."""

    def turn(self, reader: str, role: str, number: int, expected: int) -> Turn | None:
        """Let `reader` take part `number` of a role's weights; None: it has to ask again.

        It waits at the start until `expected` readers are there or JOIN_WITHIN is over. It also waits for a reading
        under way that it came too late to join, and for readers that lag too far. Raises LostTurn.
        """
        now = self.now()
        self._asked = {
            one: (part, asked) for one, (part, asked) in self._asked.items() if one == reader or now - asked <= HELD_FOR
        }
        if reader not in self._asked:
            if number:
                raise LostTurn
            if self._asked and (role != self._role or self._least > 0):
                return None
            if not self._asked:
                self._role, self._reading, self._opened = role, self._reading + 1, now
        self._asked[reader] = number, now
        is_alone = len(self._asked) < expected and now - self._opened < JOIN_WITHIN
        if (number == 0 and is_alone) or number - self._least > AHEAD:
            return None
        return Turn(self._reading, self._least)

    def leave(self, beginning: str = "") -> None:
        """Wait no longer for readers whose names begin so: they have all, or gave up."""
        self._asked = {reader: last for reader, last in self._asked.items() if not reader.startswith(beginning)}

    @property
    def _least(self) -> int:
        return min(part for part, _ in self._asked.values())


@dataclass(slots=True)
class Parts(Generic[T]):
    """Parts of one reading that a rank has gathered, and some reader has not taken."""

    _reading: int = 0
    _source: Iterator[T] = field(default_factory=lambda: iter(()))
    _made: int = 0
    _kept: dict[int, T | Exception | None] = field(default_factory=dict)

    def part(self, turn: Turn, number: int, begin: Callable[[], Iterator[T]]) -> T | None:
        """Return a part, None after the last one; `begin()` makes the iterator that gathers the parts of a new reading.

        Raises LostTurn, and for each reader the error of gathering.
        """
        if turn.reading > self._reading:
            self._reading, self._source, self._made, self._kept = turn.reading, begin(), 0, {}
        for taken in [one for one in self._kept if one < turn.least]:
            del self._kept[taken]
        if turn.reading == self._reading and number == self._made:
            self._made += 1
            try:
                self._kept[number] = next(self._source, None)
            except Exception as error:
                self._kept[number] = error
        if turn.reading < self._reading or number not in self._kept:
            raise LostTurn
        found = self._kept[number]
        if isinstance(found, Exception):
            raise found
        return found
