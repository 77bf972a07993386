"""Totals of the scores of many responses, by data source, without keeping them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentrl.offline.scores import Scores
from agentrl.reward.prompt_scores import PromptScores
from agentrl.system.json_value import JSON

CAUSES = 100
"""Different causes of failures that are told apart; the rest count as one."""
CAUSE_LENGTH = 300


@dataclass(slots=True)
class Summary:
    """Running totals of one data source. A row of which a response failed is judged by the others."""

    scores: PromptScores
    rows: int = 0
    responses: int = 0
    failures: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    def add(self, row: Scores) -> None:
        """Count one row."""
        self.rows += 1
        self.responses += len(row.scores)
        self.failures += len(row.failures)
        self.scores.add(row.scores, row.extras)
        for cause in row.failures:
            cause = cause[:CAUSE_LENGTH]
            self.causes[cause if cause in self.causes or len(self.causes) < CAUSES else "other causes"] += 1

    def numbers(self) -> dict[str, JSON]:
        """Return the numbers as JSON values. Mean, best@n, pass@k and scorers' further numbers are means over rows."""
        scores = self.scores
        return {
            "rows": self.rows,
            "responses": self.responses,
            "failures": self.failures,
            "mean": scores.mean.value,
            f"best@{scores.most}": scores.best_of_all,
            **scores.pass_at(),
            "extra": {name: mean.value for name, mean in sorted(scores.extras.items())},
            "causes": dict(self.causes.most_common()),
        }
