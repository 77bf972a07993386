"""M2PO: a bound on the second moment of the log-ratio in place of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig


class M2poOptions(BaseModel):
    """`policy_loss.options.*` of m2po."""

    m2_threshold: float = Field(0.04, gt=0)
    """Bound of the mean of (log r)^2 over the tokens that are learnt from."""


def beyond(columns: LossColumns, config: ActorConfig, seed: int, options: M2poOptions) -> Tensor:
    """Choose the tokens with the largest (log r)^2, as few as leave a mean below the bound: [T] bool."""
    places = columns.mask.nonzero()[:, 0]
    moment = (columns.logprobs.detach() - columns.rollout_logprobs)[places].double().square()
    moment, order = moment.sort(stable=True)
    mean = moment.cumsum(0) / torch.arange(1, len(moment) + 1, device=moment.device)
    chosen = torch.zeros_like(columns.mask)
    chosen[places[order[mean >= options.m2_threshold]]] = True
    return chosen


@declare(advantage_only=True, select=beyond)
def m2po(columns: LossColumns, config: ActorConfig, options: M2poOptions) -> TokenLoss:
    """M2PO (arXiv:2510.01161): L = -m A r, with r the ratio to the engine that sampled.

    m is 0 for the tokens of the largest (log r)^2, as many as it takes for the mean over the rest to fall below the
    bound. The second moment has no terms that cancel as KL's do. Few outliers are therefore left out, and tokens that
    are only stale are learnt from. Sum clip_frac: tokens of m = 0.
    """
    assert columns.selected is not None, "declared"
    change = (columns.logprobs - columns.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    left_out = columns.selected & (columns.advantages != 0)
    loss = torch.where(columns.selected, 0.0, -columns.advantages * change.exp())
    return TokenLoss(loss, {"clip_frac": left_out.sum()}, left_out)
