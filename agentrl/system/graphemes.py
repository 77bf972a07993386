"""Borders between the characters that people see: an emoji of several code points, a flag, a letter with its marks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import regex


@cache
def _grapheme() -> regex.Pattern[str]:
    import regex

    # For a flag, \X looks back over all flags before it: quadratic in their number, so flags are taken here.
    flag = r"\p{Regional_Indicator}{2}[\p{GCB=Extend}\p{GCB=ZWJ}\p{GCB=SpacingMark}]*"
    return regex.compile(rf"{flag}|\X")


class Graphemes:
    """Borders of a text's grapheme clusters (Unicode, annex 29), found in time linear in its length."""

    def __init__(self, text: str) -> None:
        self._borders: list[int] | None = None
        if not text.isascii():
            self._borders = [match.start() for match in _grapheme().finditer(text)]
            self._borders.append(len(text))

    def before(self, place: int) -> int:
        """Return the last border up to `place`, a number of code points."""
        return place if self._borders is None else self._borders[bisect_right(self._borders, place) - 1]

    def after(self, place: int) -> int:
        """Return the first border from `place` on."""
        return place if self._borders is None else self._borders[bisect_left(self._borders, place)]


def beginning(text: str, most: int) -> str:
    """Cut a text to at most `most` code points, between two characters that people see."""
    return text[: Graphemes(text[: most + 1]).before(most)] if len(text) > most else text
