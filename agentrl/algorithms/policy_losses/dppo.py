"""DPPO: the trust region is a divergence of probabilities, not a ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import log_ratio
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig

KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


@declare(keys=KEYS, advantage_only=True)
def dppo_tv(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """DPPO with the binary total variation (arXiv:2602.04879).

    L = -m sg[min(r, c)] A log p. m is 0 for a token that has moved its advantage's way by more than the bound, i.e.
    where A > 0 and p - p_old > high, or where A < 0 and p_old - p > low. So a rare token may be raised by a large
    ratio, and a likely one not by a large step. Bounds are probabilities: clip_ratio_low and clip_ratio_high; c:
    clip_ratio_c, for which the paper recommends a large number, such as 20. Sums: clip_frac, the tokens of m = 0;
    clip_frac_lower, the other tokens whose weight is c.
    """
    change = (columns.logprobs.exp() - columns.old_logprobs.exp()).detach()
    return _masked(columns, config, change > config.clip_high, change < -config.clip_low)


@declare(keys=KEYS, advantage_only=True)
def dppo_kl(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    """DPPO with the binary KL divergence (arXiv:2602.04879): as `dppo_tv`, and its bounds are of KL(p_old || p), nats.

    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), each 1 - p with 1e-8 added.
    """
    new, old = columns.logprobs.detach(), columns.old_logprobs
    rest = ((1 - old.exp() + 1e-8) / (1 - new.exp() + 1e-8)).log()
    divergence = old.exp() * (old - new) + (1 - old.exp()) * rest
    return _masked(
        columns, config, (divergence > config.clip_high) & (new > old), (divergence > config.clip_low) & (new < old)
    )


def _masked(columns: LossColumns, config: ActorConfig, too_high: Tensor, too_low: Tensor) -> TokenLoss:
    """Compute the loss without the tokens that lie too high or too low, both [T] bool, for their advantage."""
    outside = torch.where(columns.advantages > 0, too_high, too_low) & (columns.advantages != 0)
    ratio = log_ratio(columns).detach().exp()
    weight = ratio.clamp(max=config.clip_ratio_c)
    loss = torch.where(outside, 0.0, -weight * columns.advantages * columns.logprobs)
    truncated = (ratio > config.clip_ratio_c) & ~outside & (columns.advantages != 0)
    sums = {"clip_frac": outside.sum(), "clip_frac_lower": truncated.sum()}
    return TokenLoss(loss, sums, outside | truncated)
