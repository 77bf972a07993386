"""Warnings that a thousand trajectories may have at once."""

from __future__ import annotations

import logging
import re
from collections import Counter

_NUMBERS = re.compile(r"\d+")
_COMPARED = 80


class Recurring:
    """Logs the 1st, 2nd, 4th, 8th ... warning of a kind, and how many of that kind there were by then."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._seen: Counter[str] = Counter()

    def warn(self, who: str, text: str) -> None:
        """Texts are of one kind when they begin alike, numbers aside."""
        kind = _NUMBERS.sub("#", text)[:_COMPARED]
        self._seen[kind] += 1
        count = self._seen[kind]
        if count & (count - 1) == 0:
            before = f" ({count} of this kind)" if count > 1 else ""
            self.logger.warning("%s: %s%s", who, text, before)


class ToldOnce:
    """Which places have been told of."""

    def __init__(self) -> None:
        self._places: set[str] = set()

    def __call__(self, place: str) -> bool:
        """Whether it is the first time."""
        is_first = place not in self._places
        self._places.add(place)
        return is_first
