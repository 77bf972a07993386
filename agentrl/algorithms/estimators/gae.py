"""Generalised advantage estimation, as PPO uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import temporal_differences
from agentrl.algorithms.ragged import masked_whiten, suffix_sums
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare("values", keys=("gamma", "lam"))
def gae(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), whitened over the batch's policy tokens.

    delta_t = r_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}; returns = A + V before whitening. t
    counts policy tokens only: the last token before a tool answer is followed by the first one after it. Values and
    discounts of observed tokens do not enter.
    """
    order, offsets, values, delta = temporal_differences(columns, config.gamma)
    raw = torch.zeros(len(columns.mask), dtype=torch.float64, device=values.device)
    raw[order] = suffix_sums(delta, offsets, config.gamma * config.lam)
    returns = torch.zeros_like(raw)
    returns[order] = raw[order] + values
    return Advantages(masked_whiten(raw, columns.mask), returns)
