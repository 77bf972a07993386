"""Generalised advantage estimation with one lambda for the critic and another for the policy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import temporal_differences
from agentrl.algorithms.ragged import masked_whiten, suffix_sums
from agentrl.config.declaration import declare
from agentrl.system.throttle import ThrottledWarnings

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig

warnings = ThrottledWarnings(logging.getLogger(__name__))
OPTIONS = "algorithm.adv_options"
SHORT = 0.5
"""Lambda below which an advantage is little but a difference of the critic's values of two neighbouring tokens."""
ENOUGH = 10
"""Tokens ahead from which an advantage learns (lambda 0.9) with the `length_alpha` that is proposed."""


class DecoupledOptions(BaseModel):
    """`algorithm.adv_options.*` of decoupled_gae."""

    lam_policy: float | None = Field(None, ge=0, le=1)
    """Lambda of the advantages (VC-PPO: 0.95); null: by the length of the trajectory (VAPO)."""
    lam_critic: float = Field(1.0, ge=0, le=1)
    """Lambda of the critic's targets; 1: the discounted rewards to go."""
    length_alpha: float = Field(0.05, gt=0)
    """alpha of the lambda by length."""


@declare("values", keys=("gamma",))
def decoupled_gae(columns: EstimatorColumns, config: AlgorithmConfig, options: DecoupledOptions) -> Advantages:
    """Decoupled GAE (VC-PPO, arXiv:2503.01491) with length-adaptive lambda (VAPO, arXiv:2504.05118); whitened.

    delta_t as in gae; A_t = delta_t + gamma lam_policy A_{t+1}; returns_t = V_t + the same sum with lam_critic. Without
    `lam_policy` it is max(0, 1 - 1 / (alpha l)) in a trajectory of l policy tokens. The weights of the deltas then add
    up to about alpha l at any length.
    """
    order, offsets, values, delta = temporal_differences(columns, config.gamma)
    lengths = offsets.diff()
    lam = torch.repeat_interleave(_lambda(lengths, options), lengths)

    raw = torch.zeros(len(columns.mask), dtype=torch.float64, device=values.device)
    returns = torch.zeros_like(raw)
    raw[order] = suffix_sums(delta, offsets, config.gamma * lam)
    returns[order] = suffix_sums(delta, offsets, config.gamma * options.lam_critic) + values
    return Advantages(masked_whiten(raw, columns.mask), returns)


def _lambda(lengths: Tensor, options: DecoupledOptions) -> Tensor:
    """Compute the policy's lambda of trajectories of `lengths` [N] policy tokens, and warn where it is close to 0.

    The formula is made for answers of hundreds of tokens. On short ones the policy follows only the critic, which is
    still untrained, and unlearns within a few steps.
    """
    if options.lam_policy is not None:
        return torch.full(lengths.shape, options.lam_policy, dtype=torch.float64, device=lengths.device)
    lam = (1 - 1 / (options.length_alpha * lengths.double())).clamp(min=0.0)
    short = (lam < SHORT).double().mean().item() if len(lam) else 0.0
    if short > 0.5:
        usual = max(int(lengths.median()), 1)
        warnings.warn(
            "algorithm.adv_estimator=decoupled_gae",
            f"the policy's lambda, 1 - 1 / ({options.length_alpha:g} tokens), is below {SHORT:g} in {short:.0%} of the "
            f"trajectories (median {usual} tokens): advantages are the critic's guesses, and rewards hardly count. "
            f"Set {OPTIONS}.lam_policy=0.95, or {OPTIONS}.length_alpha={ENOUGH / usual:.2g} or more",
        )
    return lam
