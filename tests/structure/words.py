"""How hard prose is to read: words that carry a sentence without naming anything, and sentences that are long."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

LONG = 30
HARD = (
    "beside",
    "anew",
    "behind",
    "of which",
    "whoever",
    "whatever",
    "whichever",
    "is told",
    "are told",
    "was told",
    "were told",
    "be told",
    "tell",
    "tells",
    "go on",
    "goes on",
    "went on",
    "gone on",
    "none",
    "one that",
    "that of",
    "those that",
    "those of",
    "what is",
    "what are",
    "what was",
    "what has",
    "what have",
    "what a",
    "what an",
    "what the",
    "reckoned",
    "nor",
)
"""Words for which a plainer one exists: again, next to, after, also, continues, is warned, no X, or a thing's name."""
FOUND = re.compile(rf"\b(?:{'|'.join(sorted(HARD, key=len, reverse=True))})\b|, say\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```", re.DOTALL)
NO_PROSE = re.compile(r"^[|#].*$", re.MULTILINE)
"""Rows of tables, and headings."""
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z(*])")


@dataclass(slots=True)
class Prose:
    """What was counted of one text or several."""

    words: int = 0
    sentences: int = 0
    long: int = 0
    hard: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Prose) -> Prose:
        return Prose(
            self.words + other.words,
            self.sentences + other.sentences,
            self.long + other.long,
            self.hard + other.hard,
        )

    @property
    def hard_in_1000(self) -> float:
        return round(1000 * self.hard.total() / max(self.words, 1), 1)

    @property
    def long_in_100(self) -> float:
        """Sentences of more than 30 words, per cent."""
        return round(100 * self.long / max(self.sentences, 1), 1)


def count(texts: Iterable[str]) -> Prose:
    """Count Markdown texts or docstrings, without code, tables, headings and sentences of fewer than three words."""
    found = Prose()
    for text in texts:
        text = LINK.sub(r"\1", NO_PROSE.sub("", CODE.sub("", text)))
        text = ITEM.sub(".\n", re.sub("`[^`]*`", "X", text))
        lengths = [length for one in END.split(" ".join(text.split())) if (length := len(one.split())) > 2]
        # "None" is the value, not the word.
        hard = Counter(word.lower() for word in FOUND.findall(text) if word != "None")
        found += Prose(sum(lengths), len(lengths), sum(length > LONG for length in lengths), hard)
    return found
