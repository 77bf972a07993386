"""GRPO and Dr. GRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig

EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""


@declare(keys=("norm_adv_by_std_in_grpo",), compares_group=True, by_reward=True)
def grpo(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """GRPO with outcome supervision (arXiv:2402.03300, section 4.1.2): A_i = (R_i - mean(R)) / (std(R) + 1e-6).

    std is unbiased. With n = 1 the mean is 0 and std 1. In a group of equal rewards every A is exactly 0, rather
    than the rounding of the mean divided by 1e-6. Without `norm_adv_by_std_in_grpo`, A_i = R_i - mean(R): Dr. GRPO
    (arXiv:2503.20783, section 3.2).
    """
    groups = Groups.from_columns(columns)
    centred = groups.centred(groups.totals, groups.mean(groups.totals))
    if config.norm_adv_by_std_in_grpo:
        centred = centred / (groups.std(centred.square()) + EPSILON)[groups.group]
    return groups.spread(centred, columns)
