"""Generalised advantage estimation with one lambda for the critic and another for the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import temporal_differences
from agentrl.algorithms.ragged import masked_whiten, suffix_sums
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


class DecoupledOptions(BaseModel):
    """`algorithm.adv_options.*` of decoupled_gae."""

    lam_policy: float | None = Field(None, ge=0, le=1)
    """Lambda of the advantages (VC-PPO: 0.95); null: by the length of the trajectory (VAPO)."""
    lam_critic: float = Field(1.0, ge=0, le=1)
    """Lambda of what the critic learns; 1: the discounted rewards to go."""
    length_alpha: float = Field(0.05, gt=0)
    """alpha of the lambda by length."""


@declare("values", keys=("gamma",))
def decoupled_gae(columns: EstimatorColumns, config: AlgorithmConfig, options: DecoupledOptions) -> Advantages:
    """Decoupled GAE (VC-PPO, arXiv:2503.01491) with length-adaptive lambda (VAPO, arXiv:2504.05118); whitened.

    delta_t as in gae; A_t = delta_t + gamma lam_policy A_{t+1}; returns_t = V_t + the same sum with lam_critic.
    Without `lam_policy` it is max(0, 1 - 1 / (alpha l)) in a trajectory of l policy tokens, so that the weights of the
    deltas add up to about alpha l whatever the length is.
    """
    order, offsets, values, delta = temporal_differences(columns, config.gamma)
    lengths = torch.repeat_interleave(offsets.diff(), offsets.diff())
    adaptive = (1 - 1 / (options.length_alpha * lengths.double())).clamp(min=0.0)
    lam = adaptive if options.lam_policy is None else torch.full_like(adaptive, options.lam_policy)

    raw = torch.zeros(len(columns.mask), dtype=torch.float64, device=values.device)
    returns = torch.zeros_like(raw)
    raw[order] = suffix_sums(delta, offsets, config.gamma * lam)
    returns[order] = suffix_sums(delta, offsets, config.gamma * options.lam_critic) + values
    return Advantages(masked_whiten(raw, columns.mask), returns)
