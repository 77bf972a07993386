"""Result of the checks that run where trajectories do."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.checks.finding import Finding
from agentrl.checks.transcripts import TextCounts


@dataclass(slots=True)
class Report:
    """Findings, counts and cost since they were last taken."""

    findings: list[Finding] = field(default_factory=list)
    text: TextCounts = field(default_factory=TextCounts)
    seconds: float = 0.0
    """CPU seconds of the checks."""
    unchanged: bool = False
    """After an update of the engine's weights, none of those that were looked at differed from the ones before."""

    def add(self, other: Report) -> None:
        """Add up."""
        self.findings += other.findings
        self.text = self.text.plus(other.text)
        self.seconds += other.seconds
        self.unchanged |= other.unchanged
