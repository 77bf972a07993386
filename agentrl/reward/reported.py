"""The score that an agent reported of its own trajectory."""

from __future__ import annotations

from agentrl.trajectory import Trajectory

REPORTED = "reported_score"


def compute_score(trajectory: Trajectory) -> float:
    """Return the `score` that the agent returned; without it, the score that was posted to its session.

    Raises LookupError without either score.
    """
    numbers = trajectory.score_extra
    if REPORTED not in numbers:
        raise LookupError(
            "data_source agent/*: no score was reported. A harness, and an agent in a container, is judged by "
            "openai_proxy.check; any other agent returns {'score': NUMBER}, or somebody posts it to the session's "
            "REPORT_URL/feedback (docs/openai_endpoint.md)"
        )
    return numbers[REPORTED]
