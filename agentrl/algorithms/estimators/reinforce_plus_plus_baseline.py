"""REINFORCE++ with a group's mean as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import masked_whiten, segment_ids
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare()
def reinforce_plus_plus_baseline(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """REINFORCE++-baseline (arXiv:2501.03262): R_i - mean of its group, whitened over the batch's policy tokens.

    The mean is 0 with n = 1. Groups of equal rewards take part in the whitening and get the whitened value of 0, which
    is small; lone survivors take no part, and get 0.
    """
    groups = Groups.from_columns(columns)
    centred = groups.spread(groups.centred(groups.totals, groups.mean(groups.totals)), columns).advantages
    taught = columns.mask & groups.teaches[groups.group][groups.member][segment_ids(columns.offsets)]
    advantages = masked_whiten(centred, taught)
    return Advantages(advantages, advantages)
