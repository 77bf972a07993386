"""The optimal token baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import EQUAL, Groups
from agentrl.algorithms.ragged import segment_ids, suffix_sums
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig

EPSILON = 1e-8
"""Added to the sum of the weights before dividing by it."""


class OptimalTokenBaselineOptions(BaseModel):
    """`algorithm.adv_options.*` of optimal_token_baseline."""

    handle_zero_tail: bool = True
    """Take 0 as baseline where only one trajectory of the group is as long; false: its own reward, so that these tokens
    have no advantage."""


@declare("squared_probs")
def optimal_token_baseline(
    columns: EstimatorColumns, config: AlgorithmConfig, options: OptimalTokenBaselineOptions
) -> Advantages:
    """Optimal token baseline (arXiv:2602.07078): the baseline that has the least variance, token by token.

    A_t = G_t - B_t, with G_t the rewards from token t on and

        B_t = sum_i G_{i,t} W_{i,t} / (sum_i W_{i,t} + 1e-8)
        W_{i,t} = sum_{j <= t} (1 - 2 p_{i,j} + sum_v p_{i,j,v}^2)

    over the trajectories i of the group that have a token t. W approximates the squared norm of the gradient up to
    t. t counts policy tokens only, through all sequences of a trajectory, so tool answers shift no comparison. B is 0
    with n = 1. Where G and B are equal up to rounding, A is exactly 0. Where tokens are weighed
    (`algorithm.rollout_correction`) the weight's square is a factor of each j's term, as it is of the gradient's norm.
    """
    assert columns.squared_probs is not None, "declared"
    groups = Groups.from_columns(columns)
    order, offsets = groups.policy_order(columns)  # P policy tokens
    owner = segment_ids(offsets)  # [P], trajectory
    place = torch.arange(len(order), device=order.device) - offsets[owner]  # [P], t
    to_go = suffix_sums(columns.rewards[order], offsets, 1.0)
    energy = 1 - 2 * columns.old_logprobs[order].double().exp() + columns.squared_probs[order].double()
    if columns.correction is not None:
        energy = energy * columns.correction[order].double().square()
    running = energy.clamp(min=0).cumsum(0)  # of probabilities in float32 it may be a little below 0
    before = torch.cat([running.new_zeros(1), running])[offsets[:-1]]
    weight = running - before[owner]

    width = int(offsets.diff().max()) if len(owner) else 0
    cell = groups.group[owner] * width + place  # [P], the group's token t
    empty = torch.zeros(len(groups.size) * width, dtype=torch.float64, device=order.device)
    total = empty.index_add(0, cell, weight)
    baseline = empty.index_add(0, cell, weight * to_go) / (total + EPSILON)
    if options.handle_zero_tail:
        baseline = torch.where(torch.bincount(cell, minlength=len(empty)) > 1, baseline, 0.0)
    compared = (groups.size > 1)[groups.group][owner]
    found = to_go - torch.where(compared, baseline[cell], 0.0)
    found = torch.where(found.abs() <= EQUAL * to_go.abs(), 0.0, found)
    advantages = torch.zeros(len(columns.mask), dtype=torch.float64, device=order.device)
    returns = torch.zeros_like(advantages)
    advantages[order] = torch.where(groups.teaches[groups.group][owner], found, 0.0)
    returns[order] = to_go
    return Advantages(advantages, returns)
