"""GMPO: the geometric mean of clipped ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT, log_ratio
from agentrl.algorithms.ragged import segment_ids, segment_sum
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


@declare(keys=("clip_ratio", "clip_ratio_low", "clip_ratio_high"), advantage_only=True)
def geo_mean(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """GMPO (arXiv:2507.20673), in a token form as in `gspo`.

    With d the log-ratio, d' = min(d, high) where A > 0 and max(d, -low) where A < 0, s the exponential of the mean of
    d' over the sequence's policy tokens:  L_t = -A_t sg[s] exp(d'_t - sg[d'_t]).  Aggregated by seq-mean-token-mean,
    and with one advantage a sequence, this has the value -A s and the gradient of the paper's objective. Bounds are of
    the log-ratio; the paper takes 0.4 on both sides. Sums: clip_frac, tokens clipped where A > 0, and clip_frac_lower,
    where A < 0.
    """
    change = log_ratio(columns)
    up, down = columns.advantages > 0, columns.advantages < 0
    held = torch.where(up, change.clamp(max=config.clip_high), change)
    held = torch.where(down, change.clamp(min=-config.clip_low), held)
    counts = segment_sum(columns.mask.to(held.dtype), columns.offsets).clamp(min=1)
    mean = segment_sum(held.detach(), columns.offsets) / counts
    by_sequence = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[segment_ids(columns.offsets, len(columns.mask))]
    loss = -columns.advantages * (by_sequence + held - held.detach()).exp()
    clipped = held.detach() != change.detach()
    sums = {"clip_frac": (clipped & up).sum(), "clip_frac_lower": (clipped & down).sum()}
    return TokenLoss(loss, sums, clipped & (up | down))
