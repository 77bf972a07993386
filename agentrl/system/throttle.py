"""Warnings that a thousand trajectories may raise at once, thinned out."""

from __future__ import annotations

import logging
import re
from collections import Counter

_NUMBERS = re.compile(r"\d+")
_COMPARED = 80


class ThrottledWarnings:
    """Logger of the 1st, 2nd, 4th, 8th ... warning of a kind, with their count so far."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._seen: Counter[str] = Counter()

    def warn(self, who: str, text: str) -> None:
        """Log `text`, said by `who`, if it is its turn. Texts that begin alike, numbers aside, are of one kind."""
        kind = _NUMBERS.sub("#", text)[:_COMPARED]
        self._seen[kind] += 1
        count = self._seen[kind]
        if count & (count - 1) == 0:
            before = f" ({count} of this kind)" if count > 1 else ""
            self.logger.warning("%s: %s%s", who, text, before)


class OncePerKey:
    """Filter that is true the first time it is asked about a key."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, key: str) -> bool:
        """Return True at the first call with this key, False afterwards."""
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first
