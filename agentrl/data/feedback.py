"""Feedback: somebody's opinion of a conversation, as a number, true or false, or a word in a column of its row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.data.messages import Unfit
from agentrl.system.numbers import number_of

FEEDBACK = "feedback"
LABEL = "label"
"""TRL's name of the column."""
LARGEST = 1e300
WORDS = {
    **dict.fromkeys(("up", "thumbs_up", "good", "like"), 1.0),
    **dict.fromkeys(("down", "thumbs_down", "bad", "dislike"), -1.0),
}


def feedback_of(value: object, column: str) -> float | None:
    """Read the feedback of a row; None where nobody said anything. true, up and their like are 1, the others -1.

    Raises Unfit.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    if (number := number_of(value)) is not None and -LARGEST < number < LARGEST:
        return number
    if isinstance(value, str) and (word := value.strip().lower().replace(" ", "_").replace("-", "_")) in WORDS:
        return WORDS[word]
    raise Unfit(f"column {column}", f"a finite number, true or false, one of {', '.join(WORDS)}, or null", value)


@dataclass(slots=True)
class Heard:
    """Count of the feedback of a data set's conversations."""

    threshold: float
    above: int = 0
    below: int = 0
    """Conversations whose feedback is at the threshold or below."""
    silent: int = 0
    """Conversations without feedback."""
    unread: int = 0
    """Conversations with something else in the column, where nothing uses it."""
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float | None) -> None:
        """Count a conversation."""
        if value is None:
            self.silent += 1
            return
        self.above += value > self.threshold
        self.below += value <= self.threshold
        self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def given(self) -> int:
        """Conversations with feedback."""
        return self.above + self.below

    def told(self) -> str:
        """Write the counts in words."""
        parts = [f"{self.above} above {self.threshold:g}", f"{self.below} not above it", f"{self.silent} without any"]
        if self.unread:
            parts.append(f"{self.unread} with something that is no feedback")
        values = f", from {self.least:g} to {self.most:g}" if self.given else ""
        return f"{', '.join(parts)}{values}"


def effective_number(weights: Sequence[float]) -> float:
    """Count the equal weights with which a weighted mean would vary as much: (sum of weights)^2 / sum of squares."""
    weights = scaled(weights)
    return math.fsum(weights) ** 2 / math.fsum(weight * weight for weight in weights)


def scaled(weights: Sequence[float]) -> list[float]:
    """Divide weights by one power of two, which is exact, so that the largest is from 0.5 to 1.

    So no sum or square of them is infinite, nor are all 0.
    """
    exponent = math.frexp(max(weights))[1]
    return [math.ldexp(weight, -exponent) for weight in weights]
