"""GRPO for pass@k."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.estimators.grpo import EPSILON
from agentrl.algorithms.groups import Groups
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare(keys=("norm_adv_by_std_in_grpo",), compares_group=True)
def grpo_passk(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """Advantage for pass@k, k = n (arXiv:2503.19595): the best of a group gets R_max - R_second, the others 0.

    The value of a group is its best of n, and only the best trajectory raises it. Two best ones get 0: either would do
    without the other. With `norm_adv_by_std_in_grpo` divided by std(R) + 1e-6. A_i = R_i with n = 1.
    """
    groups = Groups.from_columns(columns)
    below = torch.full_like(groups.size, -torch.inf, dtype=torch.float64)
    first = below.scatter_reduce(0, groups.group, groups.totals, "amax")
    is_best = groups.totals == first[groups.group]
    others = torch.where(is_best, -torch.inf, groups.totals)
    second = below.scatter_reduce(0, groups.group, others, "amax")
    alone = (groups.sum(is_best) == 1)[groups.group] & is_best
    baseline = torch.where(groups.size > 1, second, 0.0)
    centred = torch.where(alone, groups.centred(groups.totals, baseline), 0.0)
    if config.norm_adv_by_std_in_grpo:
        distance = groups.totals - groups.mean(groups.totals)[groups.group]
        centred = centred / (groups.std(distance.square()) + EPSILON)[groups.group]
    return groups.spread(centred, columns)
