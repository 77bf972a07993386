"""REINFORCE++."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import masked_whiten, suffix_sums
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare(keys=("gamma",))
def reinforce_plus_plus(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """REINFORCE++ (arXiv:2501.03262): the discounted rewards from a token on, whitened over the batch's policy tokens.

    R_t = r_t + gamma * R_{t+1}, t counting policy tokens only, so a long tool answer discounts nothing.
    """
    order, offsets = Groups.from_columns(columns).policy_order(columns)
    returns = torch.zeros(len(columns.mask), dtype=torch.float64, device=columns.rewards.device)
    returns[order] = suffix_sums(columns.rewards[order], offsets, config.gamma)
    return Advantages(masked_whiten(returns, columns.mask), returns)
