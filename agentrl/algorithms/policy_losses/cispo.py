"""CISPO: bounded importance weights, and a gradient for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import log_ratio
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


@declare(keys=("clip_ratio", "clip_ratio_low", "clip_ratio_high"), advantage_only=True)
def cispo(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv:2506.13585, section 3.1): L = -sg[clip(r, 1 - low, 1 + high)] A log p.

    The clip bounds how much a token weighs; it takes no token's gradient away. The paper leaves the lower side open:
    clip_ratio_low=1. Sum clip_frac: tokens whose weight was bounded.
    """
    ratio = log_ratio(columns).detach().exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    bounded = (weight != ratio) & (columns.advantages != 0)
    return TokenLoss(-weight * columns.advantages * columns.logprobs, {"clip_frac": bounded.sum()}, bounded)
