"""Validate on the whole validation set, sampled and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config import Config
from agentrl.observe.metrics import validation_metrics
from agentrl.rollouts.async_source import AsyncSource
from agentrl.trainer.model_scores import with_model_scores
from agentrl.trajectory import Outline, Trajectory
from agentrl.trajectory.sample import Sample
from agentrl.workers.roles import Workers


def validate(
    config: Config, samples: Sequence[Sample], source: AsyncSource, workers: Workers, step: int, *, show: bool
) -> tuple[dict[str, float], Trajectory | None, list[Path]]:
    """Run all `samples` by the policy as the engine has it.

    Returns metrics, with `show` one of the trajectories, and the files that all were written to.
    """
    val = config.actor_rollout_ref.rollout.val_kwargs
    size = config.data.val_batch_size or len(samples)
    sampled: list[Outline] = []
    greedy: list[Outline] = []
    shown: Trajectory | None = None
    files: list[Path] = []
    for start in range(0, len(samples), size):
        chunk = samples[start : start + size]
        for wanted, is_greedy, kept in ((val.do_sample, False, sampled), (val.greedy, True, greedy)):
            if wanted:
                rollout = source.validate(chunk, step, greedy=is_greedy, show=show and shown is None, first=start)
                kept += with_model_scores(
                    config.reward_model, workers, source, rollout, start * (1 if is_greedy else val.n)
                )
                shown = shown or rollout.shown
                files += [path for path, _ in rollout.files]
    metrics = validation_metrics(
        sampled,
        greedy,
        turn_reward_coef=config.algorithm.turn_reward_coef,
        success_threshold=config.reward_model.success_threshold,
    )
    return metrics, shown, files
