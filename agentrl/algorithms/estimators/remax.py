"""ReMax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import EQUAL, Groups
from agentrl.algorithms.ragged import segment_ids, suffix_sums
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare("greedy_rewards")
def remax(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """ReMax (arXiv:2310.10505): A_t = G_t - R(greedy), G_t the rewards from policy token t on.

    R(greedy) is the whole reward of one more trajectory of the prompt, drawn at temperature 0 in addition to the
    others. Where the two are equal up to rounding, and where the greedy trajectory failed, A is exactly 0.
    """
    assert columns.greedy_rewards is not None, "declared"
    order, offsets = Groups.from_columns(columns).policy_order(columns)
    returns = torch.zeros(len(columns.mask), dtype=torch.float64, device=columns.rewards.device)
    returns[order] = suffix_sums(columns.rewards[order], offsets, 1.0)
    baseline = columns.greedy_rewards.double()[segment_ids(columns.offsets)]
    advantages = returns - baseline
    nothing = baseline.isnan() | (advantages.abs() <= EQUAL * torch.maximum(returns.abs(), baseline.abs()))
    return Advantages(torch.where(nothing, 0.0, advantages), returns)
