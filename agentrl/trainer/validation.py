"""Validation: the whole validation set, sampled and greedy."""

from __future__ import annotations

from agentrl.trainer.build import Parts
from agentrl.trainer.metrics import validation_metrics
from agentrl.trajectory import Trajectory


def validate(parts: Parts, step: int) -> tuple[dict[str, float], list[Trajectory]]:
    """The metrics and all validation trajectories of the policy as the engine has it."""
    val = parts.config.actor_rollout_ref.rollout.val_kwargs
    samples = parts.val_samples()
    size = parts.config.data.val_batch_size or len(samples)
    sampled: list[Trajectory] = []
    greedy: list[Trajectory] = []
    for start in range(0, len(samples), size):
        chunk = samples[start : start + size]
        for wanted, is_greedy, kept in ((val.do_sample, False, sampled), (val.greedy, True, greedy)):
            if wanted:
                kept += parts.rollouts.validate(chunk, step, greedy=is_greedy, first=start)
    coef = parts.config.algorithm.turn_reward_coef
    return validation_metrics(sampled, greedy, turn_reward_coef=coef), sampled + greedy
