"""GiGPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.estimators.grpo import EPSILON
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import suffix_sums
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


class GigpoOptions(BaseModel):
    """`algorithm.adv_options.*` of gigpo."""

    step_advantage_w: float = Field(1.0, ge=0)
    """Weight of the turn's advantage; the trajectory's has weight 1."""
    step_gamma: float = Field(0.95, ge=0, le=1)
    """Discount of the rewards of later turns, in a turn's advantage."""
    over_turns: bool = False
    """Count a trajectory once for each of its turns in the mean and deviation of its group, as the authors' code does
    by default. If false, count it once, as the paper's equation 3."""


@declare("state", keys=("norm_adv_by_std_in_grpo",))
def gigpo(columns: EstimatorColumns, config: AlgorithmConfig, options: GigpoOptions) -> Advantages:
    """GiGPO (arXiv:2505.10978): the trajectory's advantage in its group, and the turn's among turns in the same state.

    A_{i,k} = N(R_i over the group's trajectories) + w N(G_{i,k} over the group's turns that were taken in this state)
    G_{i,k} = sum_{l >= k} step_gamma^(l - k) r_{i,l}                r_{i,l} the rewards of trajectory i's turn l

    N(x) = (x - mean) / (std + 1e-6), without `norm_adv_by_std_in_grpo` x - mean. A state that is met once compares
    nothing: 0. A trajectory that is left alone of its group teaches nothing. R_i itself is the first term with n = 1.
    With `over_turns` mean and std of the first term are over all turns of the group, each with its trajectory's R_i.
    """
    assert columns.state is not None, "declared"
    groups = Groups.from_columns(columns)
    order, _, first, turn, owner, counts = groups.turns(columns)
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    earned = torch.zeros(len(owner), dtype=torch.float64, device=owner.device)
    earned.index_add_(0, turn, columns.rewards[order].double())
    to_go = suffix_sums(earned, bounds, options.step_gamma)

    places = torch.stack([groups.group[owner], columns.state[order][first]], dim=1)
    place = torch.unique(places, dim=0, return_inverse=True)[1]  # [turns]
    met = torch.bincount(place)
    steps = Groups(owner, place, to_go, met, met > 1)

    by_std = config.norm_adv_by_std_in_grpo
    if options.over_turns:
        prompt = groups.group[owner]
        size = torch.bincount(prompt, minlength=len(groups.size))
        by_trajectory = _normalised(Groups(owner, prompt, groups.totals[owner], size, groups.teaches), by_std)
    else:
        by_trajectory = _normalised(groups, by_std)[owner]
    by_turn = by_trajectory + options.step_advantage_w * _normalised(steps, by_std)
    by_turn = torch.where(groups.teaches[groups.group][owner], by_turn, 0.0)
    advantages = torch.zeros(len(columns.mask), dtype=torch.float64, device=owner.device)
    advantages[order] = by_turn[turn]
    return Advantages(advantages, advantages)


def _normalised(groups: Groups, by_std: bool) -> Tensor:
    """Compare each of the M totals with its group's: [M] float64."""
    centred = groups.centred(groups.totals, groups.mean(groups.totals))
    return centred / (groups.std(centred.square()) + EPSILON)[groups.group] if by_std else centred
