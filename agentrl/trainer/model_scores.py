"""Scores of a rollout's trajectories: the reward model's as part of their rewards, and all as columns of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from agentrl.algorithms.declared import declared_by_estimator
from agentrl.config import Config
from agentrl.config.columns import OF_SCORER
from agentrl.config.sections.reward import RewardModelConfig
from agentrl.rollouts.async_source import AsyncSource
from agentrl.rollouts.contract import Rollout
from agentrl.system.numbers import fits_float32
from agentrl.trajectory import Cause, Outline, Status
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.roles import Workers

SCORE = "reward_model"
"""The name of its score among a trajectory's further numbers."""


def with_model_scores(
    config: RewardModelConfig, workers: Workers, source: AsyncSource, rollout: Rollout, first: int = 0
) -> list[Outline]:
    """Add the reward model's part of rewards to the outlines of a rollout, which are numbered from `first`.

    Where there is no reward model, or it read nothing of a trajectory (e.g. a failed one), an outline is unchanged. A
    trajectory whose score is not finite has FAILED, as with a scorer. The rewards are also written into the files of
    the trajectories.
    """
    read = rollout.conversations
    if workers.reward_model is None or read is None:
        return rollout.outlines
    scores: dict[int, float] = {}
    if len(read):
        read = workers.reward_model.scores(read)
        _, scores = workers.executor.compute(scores_by_trajectory, read)
    coef = config.model.coef
    outlines = [
        outline if number not in scores else with_model_score(outline, scores[number], coef)
        for number, outline in enumerate(rollout.outlines, first)
    ]
    source.fill_rewards(rollout.files, outlines)
    return outlines


def with_model_score(outline: Outline, score: float, coef: float) -> Outline:
    """Add the reward model's score to the outline's reward; FAILED where it cannot be added."""
    if not fits_float32(score) or not fits_float32(coef * score):
        cause = Cause.REWARD_MODEL.value
        failure = f"{cause}: its score of this {outline.data_source} conversation is {score}, no finite number"
        return replace(outline, status=Status.FAILED, score=None, failure=failure, failure_cause=cause)
    return replace(outline, score_extra=outline.score_extra | {SCORE: score}, model_reward=coef * score)


def scores_by_trajectory(batch: RaggedBatch) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """Return (no columns, {trajectory: its score, which is the entry of rewards [T] at the end of its sequence})."""
    ends = batch.rewards[batch.offsets[1:] - 1].tolist()
    return {}, dict(zip(batch.trajectory.tolist(), ends, strict=True))


def trained_on(rollout: Rollout, outlines: list[Outline]) -> Sequences:
    """Leave out of the rollout's batch the trajectories that FAILED only in `outlines`, by `with_model_scores`."""
    assert rollout.batch is not None
    failed = {
        number
        for number, (before, after) in enumerate(zip(rollout.outlines, outlines, strict=True))
        if before.status is not after.status
    }
    if not failed:
        return rollout.batch
    owners = rollout.batch.trajectory.tolist()
    return rollout.batch.select([row for row, owner in enumerate(owners) if owner not in failed])


def outline_columns(config: Config, batch: Sequences, outlines: Sequence[Outline]) -> dict[str, torch.Tensor]:
    """Make the columns [N] of a batch whose `trajectory` counts `outlines`, as far as the config reads them.

    They are model_rewards, score_shift where transcripts have scores of their own, greedy_rewards where greedy
    trajectories were drawn, success, and the scorer's numbers.
    """
    found: dict[str, torch.Tensor] = {}
    of_rows = [outlines[number] for number in batch.trajectory.tolist()]
    if any(one.model_reward for one in of_rows):
        found["model_rewards"] = torch.tensor([one.model_reward for one in of_rows], dtype=torch.float32)
    if any(one.score_shifts for one in of_rows):
        shifts = {number: iter(one.score_shifts) for number, one in enumerate(outlines)}
        values = [next(shifts[number], 0.0) for number in batch.trajectory.tolist()]
        found["score_shift"] = torch.tensor(values, dtype=torch.float64)
    coef = config.algorithm.turn_reward_coef
    if drawn := {one.group: one.reward(coef) for one in outlines if one.baseline}:
        greedy = [drawn.get(group) for group in batch.group.tolist()]
        found["greedy_rewards"] = torch.tensor([math.nan if reward is None else reward for reward in greedy])
    if config.actor_rollout_ref.actor.success_nll_coef:
        threshold = config.reward_model.success_threshold
        succeeded = [one.score is not None and one.score >= threshold for one in of_rows]
        found["success"] = torch.tensor(succeeded, dtype=torch.bool)
    if "numbers" in declared_by_estimator(config).columns:
        names = dict.fromkeys(name for one in of_rows for name in one.numbers)
        for name in names:
            values = [one.numbers.get(name, math.nan) for one in of_rows]
            found[OF_SCORER + name] = torch.tensor(values, dtype=torch.float64)
    return found
