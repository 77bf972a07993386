"""REINFORCE leave-one-out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare(compares_group=True, by_reward=True)
def rloo(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """RLOO (arXiv:2402.14740, section 3.2): A_i = R_i - mean of the others' R; A_i = R_i with n = 1."""
    groups = Groups.from_columns(columns)
    others = groups.size / (groups.size - 1).clamp(min=1)
    centred = groups.centred(groups.totals, groups.mean(groups.totals))
    return groups.spread(others[groups.group] * centred, columns)
