"""Validation: the whole validation set, sampled and greedy."""

from __future__ import annotations

from agentrl.observe.metrics import validation_metrics
from agentrl.trainer.build import Parts
from agentrl.trainer.model_scores import with_model_scores
from agentrl.trajectory import Outline, Trajectory


def validate(parts: Parts, step: int, *, show: bool) -> tuple[dict[str, float], Trajectory | None]:
    """The metrics of the policy as the engine has it, and with `show` one of the trajectories."""
    val = parts.config.actor_rollout_ref.rollout.val_kwargs
    samples = parts.val_samples()
    size = parts.config.data.val_batch_size or len(samples)
    sampled: list[Outline] = []
    greedy: list[Outline] = []
    shown: Trajectory | None = None
    for start in range(0, len(samples), size):
        chunk = samples[start : start + size]
        for wanted, is_greedy, kept in ((val.do_sample, False, sampled), (val.greedy, True, greedy)):
            if wanted:
                rollout = parts.source.validate(chunk, step, greedy=is_greedy, show=show and shown is None, first=start)
                kept += with_model_scores(parts, rollout, start * (1 if is_greedy else val.n))
                shown = shown or rollout.shown
    metrics = validation_metrics(
        sampled,
        greedy,
        turn_reward_coef=parts.config.algorithm.turn_reward_coef,
        success_threshold=parts.config.reward_model.success_threshold,
    )
    return metrics, shown
