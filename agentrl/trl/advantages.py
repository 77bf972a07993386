"""Advantages as TRL's `GRPOTrainer` computes them, from the rewards of several functions.

A function may give no reward for a trajectory. A trajectory without any reward is unscored: it takes no part in means
and deviations, and its advantage is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.config.declaration import declare
from agentrl.trl.names import REWARD, UNSCORED

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it."""


class RelativeOptions(BaseModel):
    """`algorithm.adv_options.*` of `relative`."""

    scale: Literal["group", "batch", "none"] = "group"
    """Owner of the standard deviation that divides the differences; none: they are not divided."""


@declare("numbers", compares_group=True)
def relative(columns: EstimatorColumns, config: AlgorithmConfig, options: RelativeOptions) -> Advantages:
    """TRL's sum_then_normalize: A_i = (R_i - mean(R)) / (std(R) + 1e-4), with the unbiased std of `options.scale`."""
    groups = Groups.from_columns(columns)
    scored = ~_numbers(columns, groups, UNSCORED).isfinite()
    rewards = torch.where(scored, groups.totals, torch.nan)
    differences = rewards - _mean(rewards, groups)[groups.group]
    if options.scale == "group":
        differences = differences / (_std(rewards, groups)[groups.group] + EPSILON)
    elif options.scale == "batch":
        whole = rewards[scored]
        differences = differences / ((whole.std() if len(whole) > 1 else torch.zeros(())) + EPSILON)
    return _spread(differences, groups, columns)


class ByRewardOptions(BaseModel):
    """`algorithm.adv_options.*` of `by_reward`."""

    weights: dict[str, float]
    """The weight of each reward function, by its name."""


@declare("numbers")
def by_reward(columns: EstimatorColumns, config: AlgorithmConfig, options: ByRewardOptions) -> Advantages:
    """TRL's normalize_then_sum (GDPO, arXiv:2601.05242): each function's rewards are normalised in their group.

    A = (S - mean(S)) / (std(S) + 1e-4) over the batch, where S_i = sum_k w_k (r_ki - mean(r_k)) / (std(r_k) + 1e-4).
    """
    groups = Groups.from_columns(columns)
    total = torch.zeros_like(groups.totals)
    for name, weight in options.weights.items():
        rewards = _numbers(columns, groups, REWARD + name)
        differences = rewards - _mean(rewards, groups)[groups.group]
        total += weight * torch.nan_to_num(differences / (_std(rewards, groups)[groups.group] + EPSILON))
    scored = ~_numbers(columns, groups, UNSCORED).isfinite()
    whole = total[scored]
    deviation = whole.std() if len(whole) > 1 else torch.zeros(())
    return _spread(torch.where(scored, (total - whole.mean()) / (deviation + EPSILON), torch.nan), groups, columns)


def _numbers(columns: EstimatorColumns, groups: Groups, key: str) -> Tensor:
    """Return the number `key` of the scorer of each trajectory, [M] float64; NaN where it has no number."""
    found = torch.tensor([one.get(key, torch.nan) for one in columns.numbers], dtype=torch.float64)
    return torch.zeros_like(groups.totals).index_copy_(0, groups.member, found.to(groups.totals.device))


def _mean(values: Tensor, groups: Groups) -> Tensor:
    """Average [M] over the finite values of each group: [G] float64; NaN for a group without one."""
    return groups.sum(torch.nan_to_num(values)) / groups.sum(values.isfinite())


def _std(values: Tensor, groups: Groups) -> Tensor:
    """Compute the unbiased standard deviation of each group's finite values: [G] float64; 0 for one value."""
    squares = groups.sum(torch.nan_to_num((values - _mean(values, groups)[groups.group]).square()))
    return (squares / (groups.sum(values.isfinite()) - 1).clamp(min=1)).sqrt()


def _spread(advantages: Tensor, groups: Groups, columns: EstimatorColumns) -> Advantages:
    """Give every policy token the advantage [M] of its trajectory; 0 for NaN, and for lone survivors of a group."""
    taught = groups.teaches[groups.group]
    return groups.spread(torch.where(taught, torch.nan_to_num(advantages), 0.0), columns)
