"""Counts of what a command left out, by reason, each with its first place."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.system.visible import visible

MOST = 99


@dataclass(slots=True)
class LeftOut:
    """Number of things that were left out for a reason, and where the first of them is."""

    first: str
    count: int = 0
    further: list[str] = field(default_factory=list)
    """Places after the first, at most `MOST` of them."""


@dataclass(slots=True)
class LeftOuts:
    """All reasons of one kind."""

    reasons: dict[str, LeftOut] = field(default_factory=dict)

    def add(self, reason: str, first: str, count: int = 1) -> None:
        """Count a reason; `first` is where, and with what detail."""
        known = self.reasons.get(reason)
        if known is None:
            self.reasons[reason] = LeftOut(first, count)
            return
        known.count += count
        if len(known.further) < MOST:
            known.further.append(first)

    @property
    def total(self) -> int:
        """Number of all that were left out."""
        return sum(one.count for one in self.reasons.values())

    def by_count(self) -> list[tuple[str, LeftOut]]:
        """List the reasons, the most frequent first."""
        return sorted(self.reasons.items(), key=lambda item: -item[1].count)

    def lines(self, head: str) -> list[str]:
        """Write one line for each reason, the most frequent first."""
        return [visible(f"{head}: {one.count}, the first at {one.first}") for _, one in self.by_count()]
