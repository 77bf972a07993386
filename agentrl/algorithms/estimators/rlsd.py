"""RLSD: the reward says where to, a privileged teacher how far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.estimators.grpo import grpo
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


class RlsdOptions(BaseModel):
    """`adv_options.*` of rlsd."""

    clip: float = Field(0.2, gt=0, lt=1)
    """Distance from 1 that a token's weight may have."""
    mix: float = Field(0.5, ge=0, le=1)
    """Share of the weighted advantage at the start of the training; 0: GRPO."""
    decay_steps: int = Field(50, ge=0)
    """Updates of the policy in which that share falls linearly to 0; 0: it stays."""


@declare("teacher_logprobs", keys=("norm_adv_by_std_in_grpo",), compares_group=True)
def rlsd(columns: EstimatorColumns, config: AlgorithmConfig, options: RlsdOptions) -> Advantages:
    """RLSD (arXiv:2604.03128, equations 13 to 15 and algorithm 1): GRPO's A, each token's size weighed by a teacher.

    A_t = A ((1 - mix_v) + mix_v w_t), w_t = clip((p_T / p_S)^sign(A), 1 - clip, 1 + clip). p_T is the teacher's
    probability of the sampled token, p_S the probability under the policy before the update. w_t is above 0, so A_t
    always has the sign of A; a token without a teacher has w_t = 1. mix_v = mix max(0, 1 - v /
    decay_steps), where v is the newest version of the weights that sampled.
    """
    told = columns.teacher_logprobs
    assert told is not None, "declared"
    plain = grpo(columns, config).advantages
    share = options.mix
    if options.decay_steps and columns.mask.any():
        share *= max(0.0, 1 - int(columns.version[columns.mask].max()) / options.decay_steps)
    gain = torch.where(columns.mask & ~told.isnan(), told - columns.old_logprobs, 0.0).double()
    weight = (plain.sign() * gain).exp().clamp(1 - options.clip, 1 + options.clip)
    advantages = plain * (1 - share + share * weight)
    return Advantages(advantages, advantages)
