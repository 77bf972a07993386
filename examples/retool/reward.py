"""ReTool's reward: +1 for the right answer; -1 for a wrong one or none, and a little more for having asked."""

from __future__ import annotations

from agentrl.reward.math import compute_score as judge
from agentrl.trajectory import Trajectory

ASKED, MOST = 0.1, -0.6
"""Reward of each turn of a failure that called a tool, and the most that a failure is worth, as in verl's recipe."""


async def compute_score(solution_str: str, ground_truth: str, trajectory: Trajectory) -> dict[str, float]:
    """`correct` is 1 or 0."""
    correct = (await judge("math", solution_str, ground_truth))["score"]
    asked = sum(bool(turn.calls) for turn in trajectory.turns)
    return {"score": 1.0 if correct else min(MOST, ASKED * asked - 1), "correct": correct}
