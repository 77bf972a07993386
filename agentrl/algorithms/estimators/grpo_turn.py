"""GRPO with credit by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.estimators.grpo import EPSILON
from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import suffix_sums
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare(keys=("norm_adv_by_std_in_grpo",), compares_group=True)
def grpo_turn(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """GRPO with credit by turn: a turn answers only for the rewards that come after it began.

    After the process supervision of GRPO (arXiv:2402.03300, section 4.1.3), which gives a token the sum of the
    normalised rewards of the steps from its own on. Also after turn-level GRPO for tool-using agents
    (arXiv:2505.11821), which compares turn k with turn k of the group. Ours: with G_{i,k} the rewards of trajectory i
    from its turn k on, outcome included,

        c_{i,k} = G_{i,k} - mean_j G_{j, min(k, K_j)}        K_j turns in trajectory j
        A_{i,k} = c_{i,k} / (s + 1e-6)                       s^2 = sum_i mean_k c_{i,k}^2 / (group size - 1)

    A trajectory that has ended is represented by its last turn, so an agent that takes more turns is not rewarded for
    that alone. With rewards only at the end, or with one turn each, this is exactly `grpo`; equal trajectories have
    advantage 0. Turns are counted in the order in which they ended, over all transcripts of a trajectory.
    `norm_adv_by_std_in_grpo` decides on s as in grpo.
    """
    groups = Groups.from_columns(columns)
    order, offsets, first, turn, owner, turns = groups.turns(columns)
    to_go = suffix_sums(columns.rewards[order], offsets, 1.0)[first]  # [turns]

    start = turns.cumsum(0) - turns  # [M], the trajectory's first turn
    width = int(turns.max()) if len(owner) else 0
    column = torch.arange(width, device=turns.device).minimum((turns - 1).clamp(min=0)[:, None])  # [M, width]
    table = torch.where(turns[:, None] > 0, to_go[(start[:, None] + column).clamp(max=len(to_go) - 1)], 0.0)
    for k in range(width):
        table[:, k] = groups.centred(table[:, k], groups.mean(table[:, k]))

    own = table[owner, torch.arange(len(owner), device=turns.device) - start[owner]]  # [turns]
    if config.norm_adv_by_std_in_grpo:
        squares = torch.zeros_like(groups.totals).index_add_(0, owner, own.square()) / turns.clamp(min=1)
        own = own / (groups.std(squares) + EPSILON)[groups.group][owner]
    advantages = torch.zeros(len(columns.mask), dtype=torch.float64, device=own.device)
    advantages[order] = own[turn]
    return Advantages(advantages, advantages)
