"""Statistics of the scores of several responses to a prompt, alike in validation and in `agentrl.evaluate`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        """None when there is nothing to take it over."""
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class PromptScores:
    """Means over prompts, which are not kept. A prompt with a failed response is judged by its other responses."""

    success_threshold: float
    """The least score of a success."""
    most: int = 0
    """The most responses a prompt has: n."""
    mean: Mean = field(default_factory=Mean)
    """A prompt's mean score."""
    best: defaultdict[int, Mean] = field(default_factory=lambda: defaultdict(Mean))
    """A prompt's best score, by how many it has."""
    passed: defaultdict[int, Mean] = field(default_factory=lambda: defaultdict(Mean))
    """The chance that one of k responses succeeds, by k, over prompts that have k scores."""
    extras: defaultdict[str, Mean] = field(default_factory=lambda: defaultdict(Mean))
    """A prompt's mean of each further number of the scorer, over prompts that have it."""

    def add(self, scores: Sequence[float | None], extras: Iterable[Mapping[str, float]]) -> None:
        """Count one prompt: a score a response, None for a failure; and the further numbers of its responses."""
        self.most = max(self.most, len(scores))
        numbers: defaultdict[str, Mean] = defaultdict(Mean)
        for extra in extras:
            for name, value in extra.items():
                numbers[name].add(value)
        for name, mean in numbers.items():
            self.extras[name].add(mean.total / mean.count)
        scored = [score for score in scores if score is not None]
        if not scored:
            return
        self.mean.add(sum(scored) / len(scored))
        self.best[len(scored)].add(max(scored))
        successes = sum(score >= self.success_threshold for score in scored)
        k = 1
        while k <= len(scored):
            self.passed[k].add(pass_at_k(len(scored), successes, k))
            k *= 2

    @property
    def best_of_all(self) -> float | None:
        """The mean best score of the prompts that have `most` scores; None without such a prompt."""
        return self.best[self.most].value if self.most in self.best else None

    def pass_at(self) -> dict[str, float]:
        """pass@1, pass@2, pass@4 and so on, as far as there are prompts with so many scores."""
        return {f"pass@{k}": mean.total / mean.count for k, mean in sorted(self.passed.items())}


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Probability that at least one of k samples succeeds, from `successes` of n: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of arXiv:2107.03374, eq. 1. Raises ValueError unless 1 <= k <= n and 0 <= successes <= n.
    """
    if not (1 <= k <= n and 0 <= successes <= n):
        raise ValueError(f"pass_at_k: want 1 <= k <= n and 0 <= successes <= n, got n={n}, {successes=}, k={k}")
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)
