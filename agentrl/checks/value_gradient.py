"""The critic's loss's derivative by each value in closed form; it shares no code with the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.checks.loss_gradient import EDGE, Slopes, Term, token_weights
from agentrl.config.sections.actor import CriticConfig
from agentrl.config.sections.algorithm import LossUnit
from agentrl.observe.watch import Counts
from agentrl.trajectory.batch import RaggedBatch


def value_slopes(
    micro: RaggedBatch, values: Tensor, counts: Counts, config: CriticConfig, unit: LossUnit, norm_length: int | None
) -> Slopes:
    """Compute the derivatives by the values [T] float32 of a micro-batch.

    The clipped loss (arXiv:2005.12729) is constant where the value has left the range around the value before the
    update, and the bound of the range is further from the return than the value is.
    """
    assert micro.values is not None and micro.returns is not None
    mask, reach = micro.mask, config.cliprange_value
    value, before, returns = (torch.where(mask, one, 0.0).double() for one in (values, micro.values, micro.returns))
    off, moved = value - returns, value - before
    at_bound = before + moved.clamp(-reach, reach) - returns
    outside = moved.abs() > reach
    weight = token_weights(micro, config.loss_agg_mode, unit, counts, norm_length)
    slope = torch.where(outside & (at_bound.abs() > off.abs()), 0.0, off)
    near = (moved.abs() > reach * (1 - EDGE)) & ((at_bound.abs() - off.abs()).abs() < EDGE * (1 + off.abs()))
    scale = weight * (off.abs() + 0.01 * (value.abs() + returns.abs()))
    return Slopes({"value": Term(1.0, weight * slope, scale)}, torch.zeros_like(weight), near & mask)
