"""The score that an agent reported of its own trajectory."""

from __future__ import annotations

from agentrl.trajectory import Status, Trajectory

REPORTED = "reported_score"


def compute_score(trajectory: Trajectory) -> float:
    """Return the `score` that the agent returned; without it, the score that was posted to its session.

    Raises LookupError without either score.
    """
    numbers = trajectory.score_extra
    if REPORTED in numbers:
        return numbers[REPORTED]
    if trajectory.status in (Status.LENGTH, Status.TURN_LIMIT):
        raise LookupError(
            f"data_source agent/*: no score was reported after the budget was used up (status {trajectory.status}). "
            "The endpoint then refuses requests with code context_length_exceeded: an agent that is its own judge "
            "catches this, and reports a score all the same (docs/agents/)"
        )
    raise LookupError(
        "data_source agent/*: no score was reported. A harness, and an agent in a container, is judged by "
        "openai_proxy.check; any other agent returns {'score': NUMBER}, or somebody posts it to the session's "
        "REPORT_URL/feedback (docs/openai_endpoint.md)"
    )
