"""What the reward model says of a rollout's trajectories."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from agentrl.trajectory import Outline

if TYPE_CHECKING:
    from agentrl.batch import RaggedBatch
    from agentrl.trainer.build import Parts
    from agentrl.trainer.rollouts import Rollout

SCORE = "reward_model"
"""The name of its score among a trajectory's further numbers."""


def with_model_scores(parts: Parts, rollout: Rollout, first: int = 0) -> list[Outline]:
    """The outlines of a rollout, of which `first` is the first one's number, with the reward model's part of rewards.

    Where there is no reward model, or it read nothing of a trajectory (a failed one, say), an outline is as it was.
    The files of the trajectories are told their rewards.
    """
    read = rollout.conversations
    if parts.reward_model is None or read is None:
        return rollout.outlines
    scores: dict[int, float] = {}
    if len(read):
        read = read.with_fields(rewards=parts.reward_model.run("compute_scores", read))
        _, scores = parts.executor.compute(scores_by_trajectory, read)
    coef = parts.config.reward_model.model.coef
    outlines = [
        outline
        if number not in scores
        else replace(
            outline,
            score_extra=outline.score_extra | {SCORE: scores[number]},
            model_reward=coef * scores[number],
        )
        for number, outline in enumerate(rollout.outlines, first)
    ]
    parts.rollouts.fill_rewards(rollout.files, outlines)
    return outlines


def scores_by_trajectory(batch: RaggedBatch) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """No columns, and each trajectory's score: the reward at the end of its sequence."""
    ends = batch.rewards[batch.offsets[1:] - 1].tolist()
    return {}, dict(zip(batch.trajectory.tolist(), ends, strict=True))
