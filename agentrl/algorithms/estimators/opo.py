"""OPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import segment_sum
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare(compares_group=True, by_reward=True)
def opo(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """OPO (arXiv:2505.23585, section 3): A_i = R_i - sum(L R) / sum(L), L the policy's tokens of a trajectory.

    A_i = R_i with n = 1.
    """
    groups = Groups.from_columns(columns)
    lengths = torch.zeros_like(groups.totals)
    lengths.index_add_(0, groups.member, segment_sum(columns.mask.double(), columns.offsets))
    weighted = groups.sum(lengths * groups.totals) / groups.sum(lengths).clamp(min=1)
    baseline = torch.where(groups.size > 1, weighted, 0.0)
    return groups.spread(groups.centred(groups.totals, baseline), columns)
