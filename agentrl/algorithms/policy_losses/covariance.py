"""Clip-Cov and KL-Cov: the tokens that cost the policy its entropy are held back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import ROUNDING, clipped_loss, log_ratio
from agentrl.algorithms.ragged import masked_mean
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


class ClipCovOptions(BaseModel):
    """`policy_loss.options.*` of clip_cov."""

    clip_cov_ratio: float = Field(0.0002, gt=0, le=1)
    """Part of the policy tokens that are held back, at most; one at least."""
    clip_cov_lb: float = 1.0
    """They are drawn from the tokens whose covariance is above this."""
    clip_cov_ub: float = 5.0
    """And below this."""


class KlCovOptions(BaseModel):
    """`policy_loss.options.*` of kl_cov."""

    kl_cov_ratio: float = Field(0.0002, gt=0, le=1)
    """Part of the policy tokens that are held by the divergence; one at least."""
    ppo_kl_coef: float = Field(1.0, gt=0)
    """Weight of the divergence."""


def covariance(columns: LossColumns) -> Tensor:
    """Each token's part in the covariance of log-prob and advantage, [T] float (arXiv:2505.22617).

    (log p - mean log p) (A - mean A), means over the policy tokens.
    """
    logprobs, advantages = columns.logprobs.detach(), columns.advantages
    centred = logprobs - masked_mean(logprobs, columns.mask)
    return centred * (advantages - masked_mean(advantages, columns.mask))


def few(columns: LossColumns, part: float) -> int:
    """Count a part of the policy tokens, rounded down, one at least."""
    return max(1, int(part * int(columns.mask.sum())))


def within_bounds(columns: LossColumns, config: ActorConfig, seed: int, options: ClipCovOptions) -> Tensor:
    """Draw tokens whose covariance lies between the bounds: [T] bool."""
    found = covariance(columns)
    inside = (found > options.clip_cov_lb) & (found < options.clip_cov_ub) & columns.mask
    places = inside.nonzero()[:, 0]
    drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).to(places.device)
    chosen = torch.zeros_like(columns.mask)
    chosen[places[drawn[: few(columns, options.clip_cov_ratio)]]] = True
    return chosen


def largest(columns: LossColumns, config: ActorConfig, seed: int, options: KlCovOptions) -> Tensor:
    """Choose the tokens with the largest covariance: [T] bool."""
    found = torch.where(columns.mask, covariance(columns), -torch.inf)
    chosen = torch.zeros_like(columns.mask)
    chosen[found.topk(min(few(columns, options.kl_cov_ratio), len(found))).indices] = True
    return chosen & columns.mask


@declare(keys=("clip_ratio", "clip_ratio_low", "clip_ratio_high"), advantage_only=True, select=within_bounds)
def clip_cov(columns: LossColumns, config: ActorConfig, options: ClipCovOptions) -> TokenLoss:
    """Clip-Cov (arXiv:2505.22617): PPO's clipped loss, and 0 for some tokens of high covariance.

    Likely tokens with good outcomes, and unlikely tokens with bad ones, lower the policy's entropy; a few of them,
    drawn again each step, have no gradient. Sums: clip_frac, tokens that the ratio's clip cut off; cov_frac, tokens
    with an advantage that are held back.
    """
    assert columns.selected is not None, "declared"
    loss, clipped = clipped_loss(log_ratio(columns).exp(), columns.advantages, config.clip_low, config.clip_high)
    held = columns.selected & ~clipped
    counted = held & (columns.advantages != 0)
    sums = {"clip_frac": clipped.sum(), "cov_frac": counted.sum()}
    return TokenLoss(torch.where(held, 0.0, loss), sums, clipped)


@declare(select=largest)
def kl_cov(columns: LossColumns, config: ActorConfig, options: KlCovOptions) -> TokenLoss:
    """KL-Cov (arXiv:2505.22617): L = -A r, plus coef |log r| for the tokens of the highest covariance.

    Without a clip: the others may go where they will. A token that has not moved yet, but for `ROUNDING`, is not pulled
    back. Sum cov_frac: the tokens with an advantage that are held.
    """
    assert columns.selected is not None, "declared"
    change = log_ratio(columns)
    moved = columns.selected & (change.abs() > ROUNDING)
    penalty = torch.where(moved, options.ppo_kl_coef * change.abs(), 0.0)
    counted = columns.selected & (columns.advantages != 0)
    return TokenLoss(-columns.advantages * change.exp() + penalty, {"cov_frac": counted.sum()})
