"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """([T] loss by token, scalar count of clipped tokens); all inputs [T], `values` carries the gradient.

    0.5 * max((v - R)^2, (clip(v, v_old +- clip_range) - R)^2): PPO's clipped value loss (arXiv:2005.12729,
    section 3, with the maximum that implementations take). 0 where mask is False.
    """
    bounded = values.clamp(old_values - clip_range, old_values + clip_range)
    free_error = torch.where(mask, values - returns, 0.0).square()
    bounded_error = torch.where(mask, bounded - returns, 0.0).square()
    clipped = (bounded_error > free_error).sum()
    return 0.5 * torch.maximum(free_error, bounded_error), clipped
