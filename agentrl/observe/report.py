"""Result of watches and checks, from wherever they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from agentrl.system.metrics import Numbers

Kind = Literal["fault", "sign"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found."""

    check: str
    """Name of the check; docs/reliability.md lists them."""
    what: str
    where: str
    """Name of the trajectory, tensor, tool or server."""
    kind: Kind = "fault"
    """fault: it cannot be in a sound run; sign: it may be right, and seldom is."""


@dataclass(slots=True)
class Report:
    """Findings, counts and cost since they were last taken."""

    findings: list[Finding] = field(default_factory=list)
    evaluated: Counter[str] = field(default_factory=Counter)
    """By check, how often it compared something: silence of a check that never did says nothing."""
    numbers: Numbers = field(default_factory=dict)
    """Metrics that were found on the way."""
    evidence: Sequence[float] = ()
    """`agentrl.checks.batch.surprise_evidence` of the batch; empty where it was not computed."""
    text: Counter[str] = field(default_factory=Counter)
    """Counts of `agentrl.checks.transcripts.count_text`."""
    seconds: float = 0.0
    """CPU seconds of the checks."""
    unchanged: bool = False
    """After an update of the engine's weights, no checked tensor differed from its value before."""

    rows: dict[str, int] = field(default_factory=dict)
    """By prompt of the step, named as in its trajectories' uids, a hash of its row's messages."""
    seals: Tensor | None = None
    """Hashes of the estimate's sequences, see `agentrl.checks.update.seal`."""

    def add_check(self, check: str, found: Iterable[Finding]) -> None:
        """Count that a check compared something, and add its findings."""
        self.evaluated[check] += 1
        self.findings += found

    def add(self, other: Report) -> None:
        """Add up."""
        self.findings += other.findings
        self.evaluated += other.evaluated
        self.numbers |= other.numbers
        self.evidence = other.evidence or self.evidence
        self.text += other.text
        self.seconds += other.seconds
        self.seals = self.seals if other.seals is None else other.seals
        self.unchanged |= other.unchanged
        self.rows |= other.rows
