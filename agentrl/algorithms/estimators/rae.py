"""Role-conditioned advantage estimation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


class RaeOptions(BaseModel):
    """`algorithm.adv_options.*` of rae."""

    decay: float = Field(0.95, ge=0, lt=1)
    """Part of the running mean that a further return keeps."""


@declare("running_returns")
def rae(columns: EstimatorColumns, config: AlgorithmConfig, options: RaeOptions) -> Advantages:
    """Role-conditioned advantage estimation (RAE, arXiv:2506.24119): R - b, b a running mean of the role's returns.

    b belongs to a data source and a role, and begins at 0. In the batch's order each trajectory first moves it,
    b = decay b + (1 - decay) R, and then is compared with it (see `agentrl.algorithms.running_returns`). It needs no
    group, so it works with n = 1.
    """
    groups = Groups.from_columns(columns)
    baseline = torch.zeros_like(groups.totals).index_copy_(0, groups.member, columns.running_returns.double())
    return groups.spread(groups.totals - baseline, columns)
