"""MaxRL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.config.declaration import declare
from agentrl.errors import TrainingError

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare(compares_group=True, by_reward=True)
def maxrl(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """MaxRL (arXiv:2602.02710): A_i = (R_i - mean(R)) / mean(R), for rewards of 0 and 1.

    Divided by the share of successes, the gradient moves from the gradient of the success rate towards the gradient of
    its logarithm as n grows. A prompt that is seldom solved therefore weighs more. A group without success has
    advantage 0. A_i = R_i with n = 1. Raises TrainingError for a negative reward.
    """
    groups = Groups.from_columns(columns)
    if (groups.totals < 0).any():
        raise TrainingError(
            f"algorithm.adv_estimator=maxrl divides by a group's mean reward and needs rewards of 0 and more; found "
            f"{float(groups.totals.min()):g}. Leave out what is subtracted (turn rewards, use_kl_in_reward), or take "
            "grpo"
        )
    mean = groups.mean(groups.totals)
    share = torch.where((groups.size > 1) & (mean > 0), mean, 1.0)
    return groups.spread(groups.centred(groups.totals, mean) / share[groups.group], columns)
