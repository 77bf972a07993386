"""Online DPO: the best and the worst trajectory of a prompt as a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.pair_losses import PairLoss, Pairs, pair_weights
from agentrl.algorithms.ragged import segment_sum
from agentrl.config.declaration import declaration_of, declare
from agentrl.config.registries import PAIR_LOSSES
from agentrl.errors import ConfigError
from agentrl.system.registry import configured

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


class OnlineDpoOptions(BaseModel):
    """`adv_options.*` of online_dpo."""

    loss: str = "sigmoid"
    """The loss of a pair: sigmoid (DPO), ipo, sppo, or one of yours."""
    loss_options: dict[str, object] = Field(default_factory=dict)
    """Its options."""


@declare("ref_logprobs", compares_group=True)
def online_dpo(columns: EstimatorColumns, config: AlgorithmConfig, options: OnlineDpoOptions) -> Advantages:
    """Online DPO (arXiv:2402.04792): the trajectories of a prompt with most and with least reward are a pair.

    A is the weight of the trajectory's log-probs in the gradient of the pair's loss (see `pair_weights`). With sigmoid
    it is beta sigmoid(-beta margin) for the best, and less than 0 by as much for the worst; the others have 0. Where
    several are best or worst all their pairs count, and their mean is taken. The margin is measured with the policy
    before the update.
    """
    assert columns.ref_logprobs is not None, "declared"
    chosen = cast(PairLoss, PAIR_LOSSES.get(options.loss, OF_PAIRS))
    if declaration_of(chosen).rows != "pairs":
        raise ConfigError(f"{OF_PAIRS}={options.loss}: expected a loss of pairs, such as sigmoid")
    loss = configured(chosen, options.loss_options, OPTIONS)
    groups = Groups.from_columns(columns)

    def by_trajectory(values: Tensor) -> Tensor:
        """Add up `values` [T] over the policy tokens of each trajectory: [M] float64."""
        own = segment_sum(torch.where(columns.mask, values.double(), 0.0), columns.offsets)
        return torch.zeros_like(groups.totals).index_add_(0, groups.member, own)

    ratio = by_trajectory(columns.old_logprobs - columns.ref_logprobs)
    tokens = by_trajectory(torch.ones_like(columns.old_logprobs))
    best, worst = extremes(groups)
    found = pair_weights(loss, Pairs(ratio[best], ratio[worst], tokens[best], tokens[worst]))
    pairs = torch.bincount(groups.group[best], minlength=len(groups.size))[groups.group[best]]
    weight = torch.zeros_like(groups.totals)
    weight.index_add_(0, best, found[1] / pairs).index_add_(0, worst, found[2] / pairs)
    return groups.spread(weight, columns)


OF_PAIRS = "algorithm.adv_options.loss"
OPTIONS = "algorithm.adv_options.loss_options"


def extremes(groups: Groups) -> tuple[Tensor, Tensor]:
    """Pair each best trajectory with each worst one of its group: two [P] int64. Equal rewards make no pair."""
    totals, empty = groups.totals, torch.zeros(len(groups.size), dtype=torch.float64, device=groups.totals.device)
    high = empty.scatter_reduce(0, groups.group, totals, "amax", include_self=False)[groups.group]
    low = empty.scatter_reduce(0, groups.group, totals, "amin", include_self=False)[groups.group]
    teaches = (~groups.equal(totals) & (groups.size > 1))[groups.group]
    best, worst = ((teaches & (totals == edge)).nonzero()[:, 0] for edge in (high, low))
    left, right = (groups.group[best][:, None] == groups.group[worst]).nonzero(as_tuple=True)
    return best[left], worst[right]
