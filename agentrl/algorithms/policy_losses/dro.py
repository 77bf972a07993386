"""DRO's loss, as verl has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import log_ratio
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


class DroOptions(BaseModel):
    """`policy_loss.options.*` of dro."""

    dro_beta: float = Field(gt=0)
    """Weight of the squared log-ratio."""


@declare()
def dro(columns: LossColumns, config: ActorConfig, options: DroOptions) -> TokenLoss:
    """Policy gradient with a quadratic penalty: L = -(A log p - beta / 2 (log p - log p_old)^2).

    As verl 0.9.1 has it under this name. Tokens without advantage are still pulled towards the old policy.
    """
    return TokenLoss(0.5 * options.dro_beta * log_ratio(columns).square() - columns.advantages * columns.logprobs)
