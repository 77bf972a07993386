"""TOPR: importance weights, tapered, and only against failed responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import ROUNDING
from agentrl.algorithms.ragged import segment_ids, segment_sum
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


@declare(advantage_only=True)
def topr(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """TOPR (arXiv:2503.14286): L = -A log p where A >= 0, and -sg[min(1, p(y) / p_old(y))] A log p where A < 0.

    p(y) is the probability of all policy tokens of the sequence. Good responses are learnt like supervised text, at any
    age. Bad responses lose their weight as the policy leaves them, so their log-probs do not fall without end. Sum
    clip_frac: tokens with A < 0 whose sequence weighs 1 because the policy has come closer to it.
    """
    change = (columns.logprobs - columns.old_logprobs).detach()
    sequence = segment_ids(columns.offsets, len(columns.mask))
    total = segment_sum(change, columns.offsets)[sequence]
    rounding = ROUNDING * segment_sum(columns.mask.to(change.dtype), columns.offsets)[sequence]
    wrong = columns.advantages < 0
    weight = torch.where(wrong, total.clamp(max=0.0).exp(), 1.0)
    bounded = wrong & (total > rounding)
    return TokenLoss(-weight * columns.advantages * columns.logprobs, {"clip_frac": bounded.sum()}, bounded)
