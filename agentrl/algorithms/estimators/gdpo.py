"""GDPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.estimators.grpo import EPSILON
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import masked_whiten, segment_ids
from agentrl.config.declaration import declare
from agentrl.errors import TrainingError

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


class GdpoOptions(BaseModel):
    """`algorithm.adv_options.*` of gdpo."""

    reward_keys: list[str] = Field(["reward"], min_length=1)
    """Rewards that are normalised separately: numbers of the scorer by their names, score, or reward, which is the
    trajectory's whole reward."""
    reward_weights: list[float] | None = None
    """A weight for each of them; null: 1 each."""

    @model_validator(mode="after")
    def one_weight_each(self) -> GdpoOptions:
        """Refuse weights that do not go with the keys."""
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_keys):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for the {len(self.reward_keys)} reward_keys"
            )
        return self


@declare("numbers", keys=("norm_adv_by_std_in_grpo",))
def gdpo(columns: EstimatorColumns, config: AlgorithmConfig, options: GdpoOptions) -> Advantages:
    """GDPO (arXiv:2601.05242): rewards normalised singly in their group, their weighted sum whitened over the batch.

    A_i = whiten(sum_k w_k (r_{k,i} - mean(r_k)) / (std(r_k) + 1e-6)) over the batch's policy tokens, with the mean and
    the unbiased std over the group. Without `norm_adv_by_std_in_grpo` the differences are not divided. The mean is 0
    with n = 1. Groups of equal rewards get the whitened value of 0; lone survivors take no part, and get 0. Raises
    TrainingError where a scorer did not give one of `reward_keys`.
    """
    groups = Groups.from_columns(columns)
    total = torch.zeros_like(groups.totals)
    for key, weight in zip(
        options.reward_keys, options.reward_weights or [1.0] * len(options.reward_keys), strict=True
    ):
        rewards = groups.totals if key == "reward" else _by_trajectory(columns, groups, key)
        centred = groups.centred(rewards, groups.mean(rewards))
        if config.norm_adv_by_std_in_grpo:
            centred = centred / (groups.std(centred.square()) + EPSILON)[groups.group]
        total += weight * centred
    taught = columns.mask & groups.teaches[groups.group][groups.member][segment_ids(columns.offsets)]
    advantages = masked_whiten(groups.spread(total, columns).advantages, taught)
    return Advantages(advantages, advantages)


def _by_trajectory(columns: EstimatorColumns, groups: Groups, key: str) -> Tensor:
    """Return the number `key` of the M trajectories' scorers, [M] float64."""
    assert columns.numbers is not None, "declared"
    for sequence, numbers in enumerate(columns.numbers):
        if key not in numbers:
            raise TrainingError(
                f"algorithm.adv_options.reward_keys: the scorer of trajectory {int(columns.trajectory[sequence])} of "
                f"the step gave no {key!r}, found {', '.join(sorted({'reward', *numbers}))}"
            )
    values = torch.tensor([numbers[key] for numbers in columns.numbers], dtype=torch.float64)
    return torch.zeros_like(groups.totals).index_copy_(0, groups.member, values.to(groups.totals.device))
