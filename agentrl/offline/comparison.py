"""Two scores of the same responses, compared: how far they agree, and what training would make of the second."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from agentrl.offline.intervals import Floats, of_mean
from agentrl.offline.scores import Earlier, Responses, Scores
from agentrl.system.json_value import JSON
from agentrl.system.visible import visible
from agentrl.trajectory import OVERLONG

EQUAL = 1e-9
"""Relative difference up to which two rewards are the same."""
COMPARED = 1 << 20
"""Pairs of responses that are compared at once: a group may have any number of them."""
LISTED = 20
"""Responses that are listed, of those whose scores differ most."""
EXCERPT = 200
"""Characters of a response that are listed."""


@dataclass(frozen=True, slots=True)
class Different:
    """A response whose scores differ."""

    earlier: Earlier
    score: float
    data_source: str
    text: str

    @property
    def size(self) -> float:
        """Distance of its two scores."""
        return abs(self.score - (self.earlier.score or 0.0))

    def as_json(self) -> dict[str, JSON]:
        """Return it with the beginning of its text."""
        one = self.earlier
        text = visible(self.text[:EXCERPT]) + (" ..." if len(self.text) > EXCERPT else "")
        place: dict[str, JSON] = {"uid": one.uid, "step": one.step, "data_source": self.data_source}
        return {**place, "first": one.score, "second": self.score, "text": text, "page": one.page}


@dataclass(slots=True)
class Comparison:
    """Running comparison of two scores; a row's responses are its group."""

    threshold: float
    """The least score of a success."""
    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    """Both scores of each response that has both."""
    sizes: list[int] = field(default_factory=list)
    """Responses of each group among them."""
    only_first: int = 0
    only_second: int = 0
    """Responses with one of the scores."""
    concordant: int = 0
    """Pairs of a group that both scores order alike, less those that they order the other way round."""
    ordered: tuple[int, int] = (0, 0)
    """Pairs of a group that the first score orders, and the second."""
    signals: tuple[int, int] = (0, 0)
    """Groups that have an advantage by the first rewards, and by the second."""
    groups: int = 0
    """Groups of at least two responses whose advantages are compared."""
    gained: int = 0
    lost: int = 0
    turned: int = 0
    """Groups that get or lose an advantage, and groups in which one changes its sign."""
    turned_responses: int = 0
    """Responses whose advantage changes its sign."""

    def add(self, row: Responses, scores: Scores) -> None:
        """Count one group."""
        scored = zip(row.earlier, scores.scores, strict=True)
        both = [(one.score, score) for one, score in scored if one.score is not None and score is not None]
        self.only_first += sum(one.score is not None for one in row.earlier) - len(both)
        self.only_second += sum(score is not None for score in scores.scores) - len(both)
        if not both:
            return
        first, second = (np.array(values, dtype=np.float64) for values in zip(*both, strict=True))
        self.first += first.tolist()
        self.second += second.tolist()
        self.sizes.append(len(both))
        rows, pairs = max(1, COMPARED // len(both)), np.zeros(3, np.int64)
        for at in range(0, len(both), rows):
            one, other = (np.sign(values[at : at + rows, None] - values) for values in (first, second))
            pairs += [int((one * other).sum()), int(abs(one).sum()), int(abs(other).sum())]
        concordant, ordered, ordered_again = (pairs // 2).tolist()  # each pair was met from both sides
        self.concordant += concordant
        self.ordered = (self.ordered[0] + ordered, self.ordered[1] + ordered_again)
        self._add_advantages(row, scores)

    def _add_advantages(self, row: Responses, scores: Scores) -> None:
        first, second = rewards(row, scores)
        if len(first) < 2:
            return
        one, other = signs(first), signs(second)
        before, after = bool(one.any()), bool(other.any())
        turned = int((one * other < 0).sum())
        self.groups += 1
        self.signals = (self.signals[0] + before, self.signals[1] + after)
        self.gained += after and not before
        self.lost += before and not after
        self.turned += turned > 0
        self.turned_responses += turned

    def numbers(self) -> dict[str, JSON]:
        """Return the numbers as JSON values; null where too few responses have both scores."""
        first, second = np.array(self.first), np.array(self.second)
        count, difference = len(first), second - first
        alike = (first >= self.threshold) == (second >= self.threshold)
        low, high = of_mean(difference, self.sizes) or (None, None)
        pairs = math.sqrt(self.ordered[0] * self.ordered[1])
        return {
            "responses": count,
            "only_first": self.only_first,
            "only_second": self.only_second,
            "mean_first": float(first.mean()) if count else None,
            "mean_second": float(second.mean()) if count else None,
            "mean_difference": float(difference.mean()) if count else None,
            "interval": [low, high],
            "agreement": float(alike.mean()) if count else None,
            "rank_correlation": rank_correlation(first, second),
            "tau_within_groups": self.concordant / pairs if pairs else None,
            "groups": self.groups,
            "signal_first": self._share(self.signals[0]),
            "signal_second": self._share(self.signals[1]),
            "signal_gained": self._share(self.gained),
            "signal_lost": self._share(self.lost),
            "sign_changed": self._share(self.turned),
            "responses_sign_changed": self.turned_responses,
        }

    def _share(self, groups: int) -> float | None:
        return groups / self.groups if self.groups else None


class Differences:
    """The responses whose scores differ most."""

    def __init__(self) -> None:
        self._found: list[tuple[float, int, Different]] = []
        self._count = 0

    def add(self, row: Responses, scores: Scores) -> None:
        """Take the responses of one group."""
        for one, text, score in zip(row.earlier, row.texts, scores.scores, strict=True):
            if score is None or one.score is None or score == one.score:
                continue
            self._count += 1  # of two that differ as much, the first stays
            entry = Different(one, score, row.sample.data_source, text or "")
            heapq.heappush(self._found, (entry.size, -self._count, entry))
            if len(self._found) > LISTED:
                heapq.heappop(self._found)

    def __iter__(self) -> Iterator[Different]:
        return (entry for *_, entry in sorted(self._found, key=lambda one: one[:2], reverse=True))


def rewards(row: Responses, scores: Scores) -> tuple[Floats, Floats]:
    """Return the rewards [n] that training would take by each score, of the responses with both.

    The second is the first with its score replaced. Where no reward is recorded (validation, `agentrl.generate`), the
    score is the reward; where some are, responses without one are left out, as training left them out.
    """
    recorded = any(one.reward is not None for one in row.earlier)
    extras = iter(scores.extras)
    first, second = list[float](), list[float]()
    for one, score in zip(row.earlier, scores.scores, strict=True):
        if score is None:
            continue
        penalty = next(extras).get(OVERLONG, 0.0)
        reward = one.reward if recorded else one.score
        if one.score is not None and reward is not None:
            first.append(reward)
            second.append(reward + (score - one.score) + (penalty - one.penalty if recorded else 0.0))
    return np.array(first), np.array(second)


def signs(values: Floats) -> Floats:
    """Return the signs of a group's advantages: of the rewards less their mean; all 0 where the rewards are equal."""
    size = max(1.0, float(np.abs(values).max()))
    centred = values - values.mean()
    return np.where(np.abs(centred) <= EQUAL * size, 0.0, np.sign(centred))


def rank_correlation(first: Floats, second: Floats) -> float | None:
    """Return Spearman's coefficient: the correlation of ranks; equal values share the mean of their ranks.

    None where one of the scores is the same everywhere.
    """
    one, other = (ranks(values) for values in (first, second))
    if len(one) < 2 or not one.any() or not other.any():
        return None
    return float((one * other).sum() / math.sqrt(float((one**2).sum() * (other**2).sum())))


def ranks(values: Floats) -> Floats:
    """Return the ranks less their mean; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place] - (len(values) + 1) / 2
