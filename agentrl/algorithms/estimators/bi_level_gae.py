"""Generalised advantage estimation on two levels, turns and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import following, masked_whiten, suffix_sums
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


class BiLevelOptions(BaseModel):
    """`algorithm.adv_options.*` of bi_level_gae."""

    turn_gamma: float = Field(1.0, ge=0, le=1)
    """Discount of the rewards of later turns."""
    turn_lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the estimation over turns."""


@declare("values", keys=("gamma", "lam"))
def bi_level_gae(columns: EstimatorColumns, config: AlgorithmConfig, options: BiLevelOptions) -> Advantages:
    """Bi-level GAE (arXiv:2510.16907): over a trajectory's turns, then over the tokens of each turn; whitened.

    With r_k and V_k the reward and the value of the last token of turn k, and t+1 the next token of the same turn:

        d_k = r_k + turn_gamma V_{k+1} - V_k        A_k = d_k + turn_gamma turn_lam A_{k+1}
        d_t = r_t + gamma V_{t+1} - V_t             A_t = d_t + gamma lam A_{t+1}, and A_k at the turn's last token

    Returns = A + V before whitening. Tokens within a turn are discounted by gamma, turns by turn_gamma. Long turns and
    many turns alone therefore do not make the reward at the end fade. With one turn it is gae. Turns are counted in the
    order in which they ended, over all transcripts of a trajectory.
    """
    assert columns.values is not None, "declared"
    order, _, _, turn, _, counts = Groups.from_columns(columns).turns(columns)
    values, rewards = columns.values[order].double(), columns.rewards[order].double()
    offsets, bounds = _bounds(torch.bincount(turn, minlength=int(counts.sum()))), _bounds(counts)
    last = offsets[1:] - 1

    by_turn = rewards[last] + options.turn_gamma * following(values[last], bounds) - values[last]
    delta = rewards + config.gamma * following(values, offsets) - values
    delta[last] = suffix_sums(by_turn, bounds, options.turn_gamma * options.turn_lam)

    raw = torch.zeros(len(columns.mask), dtype=torch.float64, device=values.device)
    returns = torch.zeros_like(raw)
    raw[order] = suffix_sums(delta, offsets, config.gamma * config.lam)
    returns[order] = raw[order] + values
    return Advantages(masked_whiten(raw, columns.mask), returns)


def _bounds(counts: Tensor) -> Tensor:
    """Bounds of N stretches of so many entries: [N + 1] int64."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
