"""Summary, at a run's end, of the problems in its steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from agentrl.tool import ErrorKind
from agentrl.trajectory import Outline, cause_of

RETRIES = "retries/"
"""Prefix of a trajectory's numbers of fresh tries, by the cause of the failure before each."""
TOOL_FAILED = (ErrorKind.EXECUTION, ErrorKind.TIMEOUT)
"""Errors of calls that are a tool's, or its server's, rather than the policy's."""


class ErrorSummary:
    """Failures and fresh tries by cause and agent loop, failed calls by tool, and steps whose rewards taught nothing.

    Only steps of this process count.
    """

    def __init__(self) -> None:
        self.steps = self.idle = self.trajectories = 0
        self.failed: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Trajectories without a score: by cause, then by loop."""
        self.retried: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Fresh tries, in the same way."""
        self.tools: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By tool: its `calls`, failed calls by kind, and `faults`."""

    def add(self, outlines: Sequence[Outline], metrics: Mapping[str, float], *, learnt: bool) -> None:
        """Add a step's trajectories and the metrics of its tools. `learnt`: some sequence had an advantage."""
        self.steps += 1
        self.idle += not learnt
        self.trajectories += len(outlines)
        for outline in outlines:
            if outline.score is None:
                self.failed[cause_of(outline)][outline.agent_name] += 1
            for name, count in outline.metrics.items():
                if name.startswith(RETRIES):
                    self.retried[name.removeprefix(RETRIES)][outline.agent_name] += int(count)
            for call in outline.calls:
                if call.error not in (ErrorKind.UNKNOWN_TOOL, ErrorKind.PARSE):  # names that the policy made up
                    self.tools[call.name]["calls"] += 1
                    if call.error in TOOL_FAILED:
                        self.tools[call.name][str(call.error)] += 1
        for name, value in metrics.items():
            if name.startswith("tool/") and name.endswith("/faults"):
                self.tools[name.removeprefix("tool/").removesuffix("/faults")]["faults"] += int(value)

    def text(self) -> str | None:
        """Write the summary, a line for each kind of error; None without errors."""
        lines = []
        if failed := sum(sum(loops.values()) for loops in self.failed.values()):
            lines.append(f"{failed} of {self.trajectories} trajectories failed: {_by_cause(self.failed)}")
        if retried := sum(sum(loops.values()) for loops in self.retried.values()):
            lines.append(f"{retried} fresh tries: {_by_cause(self.retried)}")
        for name, counts in sorted(self.tools.items()):
            kinds = [f"{kind} {counts[kind]}" for kind in (*map(str, TOOL_FAILED), "faults") if counts[kind]]
            if kinds:
                lines.append(f"tool {name}, {counts['calls']} calls: {', '.join(kinds)}")
        if self.idle:
            lines.append(f"{self.idle} of {self.steps} steps in which rewards taught nothing (train/sequences is 0)")
        return "\n".join([f"in the {self.steps} steps of this process:", *lines]) if lines else None


def _by_cause(counts: Mapping[str, Counter[str]]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -sum(item[1].values()))
    return "; ".join(
        f"{cause} {', '.join(f'{count} in {loop}' for loop, count in loops.most_common())}" for cause, loops in ordered
    )
