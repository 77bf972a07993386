"""The score that the row's interaction gave the whole dialogue."""

from __future__ import annotations

from agentrl.trajectory import COUNTED, Trajectory


def compute_score(trajectory: Trajectory) -> dict[str, float]:
    """Return what `Interaction.calculate_score` returned, in which the scores of its turns are counted.

    Raises LookupError when the row has no interaction, or the interaction no score.
    """
    numbers = trajectory.score_extra
    if "interaction_score" not in numbers:
        raise LookupError("data_source interaction/*: the row has no interaction that scores the dialogue")
    return {"score": numbers["interaction_score"], COUNTED: numbers.get("interaction_turn_score", 0.0)}
