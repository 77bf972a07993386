"""The rewards that tools gave: for tasks whose tools judge a trajectory's acts."""

from __future__ import annotations

from agentrl.trajectory import COUNTED, Trajectory


def compute_score(trajectory: Trajectory) -> dict[str, float]:
    """Return the sum of the turn rewards as the score, in which they are counted; 0 where no tool gave one."""
    total = float(sum(trajectory.turn_rewards))
    return {"score": total, COUNTED: total}
