"""The trajectories of a batch by prompt: one total reward each, and statistics over the trajectories of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.ragged import segment_sum

EQUAL = 1e-6
"""Rewards of a group count as equal when they lie within this fraction of the largest of them."""


@dataclass(frozen=True, slots=True)
class Groups:
    """M trajectories of G prompts. A trajectory counts once, however many sequences it has."""

    member: Tensor  # [N] int64, the trajectory (0..M-1) of each sequence
    group: Tensor  # [M] int64, the group (0..G-1) of each trajectory
    totals: Tensor  # [M] float64, the sum of the trajectory's token rewards
    size: Tensor  # [G] int64, trajectories of the group
    teaches: Tensor  # [G] bool, False for a lone survivor: a group of one of which more were asked for

    @classmethod
    def of(cls, rewards: Tensor, offsets: Tensor, group: Tensor, trajectory: Tensor, n: int) -> Groups:
        """rewards [T], offsets [N + 1], group and trajectory [N]: the fields of a `RaggedBatch`.

        n: trajectories that were asked for of each prompt; those that failed are not in the batch.
        """
        trajectories, member = torch.unique(trajectory, return_inverse=True)
        group_of = torch.zeros_like(trajectories).index_copy_(0, member, group)
        groups, group_index = torch.unique(group_of, return_inverse=True)
        totals = torch.zeros(len(trajectories), dtype=torch.float64, device=rewards.device)
        totals.index_add_(0, member, segment_sum(rewards.double(), offsets))
        size = torch.bincount(group_index, minlength=len(groups))
        return cls(member, group_index, totals, size, size >= min(n, 2))

    def sum(self, values: Tensor) -> Tensor:
        """[G] float64: the sum over each group of `values` [M]."""
        return torch.zeros(len(self.size), dtype=torch.float64, device=values.device).index_add_(
            0, self.group, values.double()
        )

    def mean(self, values: Tensor) -> Tensor:
        """[G] float64: the mean over each group of `values` [M]; 0 for a group of one, which has no baseline."""
        return torch.where(self.size > 1, self.sum(values) / self.size, 0.0)

    def std(self, squares: Tensor) -> Tensor:
        """[G] float64: the unbiased deviation, from squared distances [M] to the mean; 1 for a group of one."""
        variance = self.sum(squares) / (self.size - 1).clamp(min=1)
        return torch.where(self.size > 1, variance.sqrt(), 1.0)

    def equal(self, values: Tensor) -> Tensor:
        """[G] bool: all of a group's `values` [M] are the same, up to rounding; False for a group of one."""
        values = values.double()
        empty = torch.zeros(len(self.size), dtype=torch.float64, device=values.device)
        high = empty.scatter_reduce(0, self.group, values, "amax", include_self=False)
        low = empty.scatter_reduce(0, self.group, values, "amin", include_self=False)
        largest = torch.maximum(high.abs(), low.abs())
        return (high - low <= EQUAL * largest) & (self.size > 1)
