"""SAPO: a smooth gate in place of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import log_ratio
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


class SapoOptions(BaseModel):
    """`policy_loss.options.*` of sapo."""

    tau_pos: float = Field(1.0, gt=0)
    """Temperature of the gate where the advantage is positive; larger is narrower."""
    tau_neg: float = Field(1.05, gt=0)
    """Temperature elsewhere: narrower, since such tokens are less stable."""


@declare(advantage_only=True)
def sapo(columns: LossColumns, config: ActorConfig, options: SapoOptions) -> TokenLoss:
    """SAPO (arXiv:2511.20347): L = -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A.

    The gradient's weight is 1 at r = 1 and falls off smoothly on both sides. The paper's objective needs the
    aggregation seq-mean-token-mean.
    """
    ratio = log_ratio(columns).exp()
    tau = torch.full_like(ratio, options.tau_neg).masked_fill(columns.advantages > 0, options.tau_pos)
    return TokenLoss(-columns.advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau))
