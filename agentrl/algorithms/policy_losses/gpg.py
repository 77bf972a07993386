"""GPG's loss: the policy gradient alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


@declare(advantage_only=True)
def gpg(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """GPG (arXiv:2504.02546): L = -A log p, the policy gradient without ratio and clip.

    It is right for the policy that sampled: one mini-batch and one epoch a step.
    """
    return TokenLoss(-columns.advantages * columns.logprobs)
