"""GSPO: the importance ratio of a whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT, clipped_loss
from agentrl.algorithms.ragged import segment_ids, segment_sum
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


@declare(keys=("clip_ratio", "clip_ratio_low", "clip_ratio_high"), advantage_only=True)
def gspo(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """GSPO with a ratio by sequence (arXiv:2507.18071, eq. 7), in its token form GSPO-token (eq. 13, 14).

    s_i = exp(mean of the log-ratio over the sequence's policy tokens); s_{i,t} = sg[s_i] * p_t / sg[p_t], so every
    token has the sequence's ratio as its value and its own log-prob's gradient. No dual clip. The paper's objective
    needs the aggregation seq-mean-token-mean and clip bounds of about 3e-4. Sums: as `vanilla`.
    """
    log_ratio = columns.logprobs - columns.old_logprobs
    counts = segment_sum(columns.mask.to(log_ratio.dtype), columns.offsets).clamp(min=1)
    mean = segment_sum(log_ratio.detach(), columns.offsets) / counts
    by_sequence = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[segment_ids(columns.offsets, len(columns.mask))]
    ratio = (by_sequence + log_ratio - log_ratio.detach()).exp()
    loss, clipped = clipped_loss(ratio, columns.advantages, config.clip_low, config.clip_high)
    sums = {"clip_frac": clipped.sum(), "clip_frac_lower": (clipped & False).sum()}
    return TokenLoss(loss, sums, clipped)
