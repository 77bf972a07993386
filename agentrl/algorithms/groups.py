"""The trajectories of a batch by prompt: one total reward each, and statistics over the trajectories of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.ragged import following, segment_ids, segment_sum

EQUAL = 1e-6
"""Rewards of a group count as equal when they lie within this fraction of the largest of them."""
CANCELLED = 1e-7
"""Difference of equal totals near 0: a score and rewards of turns that cancel leave the rounding of float32."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Check whether a group's rewards, at least one, are all the same, as `Groups.equal` does."""
    high, low = max(rewards), min(rewards)
    return high - low <= max(EQUAL * max(abs(high), abs(low)), CANCELLED)


class PolicyTurns(NamedTuple):
    """K turns of M trajectories, each trajectory's after one another in the order in which they ended, and their P
    policy tokens."""

    order: Tensor  # [P] int64, the tokens' positions in the batch
    offsets: Tensor  # [M + 1] int64, where each trajectory's tokens begin
    first: Tensor  # [P] bool, the token opens a turn
    turn: Tensor  # [P] int64, the turn (0..K-1) of each token
    owner: Tensor  # [K] int64, the trajectory (0..M-1) of each turn
    counts: Tensor  # [M] int64, turns of each trajectory


@dataclass(frozen=True, slots=True)
class Groups:
    """M trajectories of G prompts. A trajectory counts once, however many sequences it has."""

    member: Tensor  # [N] int64, the trajectory (0..M-1) of each sequence
    group: Tensor  # [M] int64, the group (0..G-1) of each trajectory
    totals: Tensor  # [M] float64, the sum of the trajectory's token rewards
    size: Tensor  # [G] int64, trajectories of the group
    teaches: Tensor  # [G] bool, False for a lone survivor: a group of size 1 although n > 1

    @staticmethod
    def from_columns(columns: EstimatorColumns) -> Groups:
        """Add up the rewards of each trajectory, and number trajectories and groups from 0."""
        trajectories, member = torch.unique(columns.trajectory, return_inverse=True)
        group_of = torch.zeros_like(trajectories).index_copy_(0, member, columns.group)
        groups, group_index = torch.unique(group_of, return_inverse=True)
        totals = torch.zeros(len(trajectories), dtype=torch.float64, device=columns.rewards.device)
        totals.index_add_(0, member, segment_sum(columns.rewards.double(), columns.offsets))
        size = torch.bincount(group_index, minlength=len(groups))
        return Groups(member, group_index, totals, size, size >= min(columns.n, 2))

    of = from_columns
    """Name of before."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` [M] over each group: [G] float64."""
        return torch.zeros(len(self.size), dtype=torch.float64, device=values.device).index_add_(
            0, self.group, values.double()
        )

    def mean(self, values: Tensor) -> Tensor:
        """Average `values` [M] over each group: [G] float64; 0 for a group of one, which has no baseline."""
        return torch.where(self.size > 1, self.sum(values) / self.size, 0.0)

    def std(self, squares: Tensor) -> Tensor:
        """Unbiased standard deviation [G] float64, from squared distances [M] to the mean; 1 for a group of one."""
        variance = self.sum(squares) / (self.size - 1).clamp(min=1)
        return torch.where(self.size > 1, variance.sqrt(), 1.0)

    def equal(self, values: Tensor) -> Tensor:
        """Groups whose `values` [M] are all the same up to rounding: [G] bool; False for a group of one."""
        values = values.double()
        empty = torch.zeros(len(self.size), dtype=torch.float64, device=values.device)
        high = empty.scatter_reduce(0, self.group, values, "amax", include_self=False)
        low = empty.scatter_reduce(0, self.group, values, "amin", include_self=False)
        largest = torch.maximum(high.abs(), low.abs())
        return (high - low <= (EQUAL * largest).clamp(min=CANCELLED)) & (self.size > 1)

    def centred(self, values: Tensor, baseline: Tensor) -> Tensor:
        """Subtract their group's `baseline` [G] from `values` [M]: [M] float64.

        Exactly 0 where a group's values are equal, and where the group teaches nothing.
        """
        nothing = self.equal(values) | ~self.teaches
        return torch.where(nothing[self.group], 0.0, values - baseline[self.group])

    def spread(self, advantage: Tensor, columns: EstimatorColumns) -> Advantages:
        """Give every policy token the `advantage` [M] of its trajectory; the returns are equal."""
        advantages = torch.where(columns.mask, advantage[self.member][segment_ids(columns.offsets)], 0.0)
        return Advantages(advantages, advantages)

    def turns(self, columns: EstimatorColumns) -> PolicyTurns:
        """Separate turns by the trajectories' records, over all sequences of a trajectory."""
        order, offsets = self.policy_order(columns, columns.turn)
        owner, turn = segment_ids(offsets), columns.turn[order]
        first = torch.ones_like(turn, dtype=torch.bool)
        first[1:] = (turn[1:] != turn[:-1]) | (owner[1:] != owner[:-1])
        owners = owner[first]
        counts = torch.bincount(owners, minlength=len(self.totals))
        return PolicyTurns(order, offsets, first, first.long().cumsum(0) - 1, owners, counts)

    def policy_order(self, columns: EstimatorColumns, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sort the policy tokens by trajectory: ([P] int64 positions, [M + 1] int64 offsets of the trajectories).

        Within a trajectory they stay in the order of the batch, or ascend by `key` [T].
        """
        positions = torch.nonzero(columns.mask).flatten()
        if key is not None:
            positions = positions[torch.argsort(key[positions], stable=True)]
        owner = self.member[segment_ids(columns.offsets)[positions]]
        order = positions[torch.argsort(owner, stable=True)]
        offsets = torch.zeros(len(self.totals) + 1, dtype=torch.int64, device=positions.device)
        torch.cumsum(torch.bincount(owner, minlength=len(self.totals)), 0, out=offsets[1:])
        return order, offsets


def temporal_differences(columns: EstimatorColumns, gamma: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute delta_t = r_t + gamma V_{t+1} - V_t over policy tokens alone (arXiv:1506.02438, eq. 10).

    Returns `Groups.policy_order` (order [P] int64, offsets), and in that order values and deltas, [P] float64. The
    value after a trajectory's last policy token is 0.
    """
    assert columns.values is not None, "declared"
    order, offsets = Groups.from_columns(columns).policy_order(columns)
    values = columns.values[order].double()
    return order, offsets, values, columns.rewards[order].double() + gamma * following(values, offsets) - values
