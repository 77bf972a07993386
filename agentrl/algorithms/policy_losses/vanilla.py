"""PPO's clipped surrogate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import clipped_loss, log_ratio
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


@declare(keys=("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), advantage_only=True)
def vanilla(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476, eq. 10) and
    the dual clip for negative advantages (arXiv:1912.09729, "Dual-clip PPO").

    r = exp(clamp(log-ratio, +-20));  L = max(-A r, -A clip(r, 1 - low, 1 + high));  where A < 0: L = min(L, -A dual).
    Sums: clip_frac, clip_frac_lower: tokens whose gradient the bounds, the dual clip cut off.
    """
    loss, clipped = clipped_loss(log_ratio(columns).exp(), columns.advantages, config.clip_low, config.clip_high)
    bound = -columns.advantages * config.clip_ratio_c
    dual_clipped = (columns.advantages < 0) & (loss > bound)
    loss = torch.where(dual_clipped, bound, loss)
    sums = {"clip_frac": clipped.sum(), "clip_frac_lower": dual_clipped.sum()}
    return TokenLoss(loss, sums, clipped | dual_clipped)
