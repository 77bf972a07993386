"""The log-ratio and the clipped surrogate that losses with an importance ratio share."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.columns import LossColumns

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this on both sides before exp."""
ROUNDING = 1e-5
"""Log-ratios of a token up to this are 0 but for rounding, whose sign is chance: another cut into micro-batches, or
other ranks, give another one."""


def log_ratio(columns: LossColumns) -> Tensor:
    """Return log p - log p_old, clamped: [T] float with gradient."""
    return (columns.logprobs - columns.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return ([T] max(-A r, -A clip(r, 1 - low, 1 + high)), [T] bool: the clipped one is larger).

    ratio [T] float with gradient, advantages [T] float.
    """
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, bounded), bounded > free
