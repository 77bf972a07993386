"""Advantage estimators on the ragged batch.

All of them give (advantages [T], returns [T]) float32, 0 where the policy did not sample. A trajectory's reward is the
sum of the token rewards of all its sequences, and its sequences follow one another in the order of the batch.

`n` is the number of trajectories that were asked for of each prompt. Those that failed are not in the batch, so a group
may be smaller. With n > 1, estimators that compare the trajectories of a prompt give a group of one advantage 0: there
is nothing to compare it with, and its raw reward is no advantage. With n = 1 they take the reward itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algorithms.groups import Groups
from agentrl.algorithms.ragged import masked_whiten, segment_ids, segment_sum, suffix_sums

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig
    from agentrl.trajectory.batch import RaggedBatch

EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""

Estimate = tuple[Tensor, Tensor]


def compute_advantages(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> RaggedBatch:
    """`batch` with `advantages` and `returns` by `config.adv_estimator`. `gae` needs `batch.values`."""
    with torch.no_grad():
        advantages, returns = ESTIMATORS[config.adv_estimator](batch, config, n)
    return replace(batch, advantages=advantages.float(), returns=returns.float())


def zero_advantage_sequences(batch: RaggedBatch) -> list[int]:
    """Sequences whose advantages are all exactly 0, so that the policy gradient of each of their tokens is, too."""
    assert batch.advantages is not None, "compute_advantages comes first"
    nonzero = segment_sum((batch.advantages != 0).double(), batch.offsets)
    return torch.nonzero(nonzero == 0).flatten().tolist()


def group_counts(batch: RaggedBatch, n: int) -> dict[str, int]:
    """groups; groups_of_one; groups_equal: those of two or more whose rewards are all the same."""
    groups = _groups(batch, n)
    return {
        "groups": len(groups.size),
        "groups_of_one": int((groups.size == 1).sum()),
        "groups_equal": int(groups.equal(groups.totals).sum()),
    }


def grpo(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Estimate:
    """GRPO with outcome supervision (arXiv:2402.03300, section 4.1.2): A_i = (R_i - mean(R)) / (std(R) + 1e-6).

    std is unbiased. With n = 1 the mean is 0 and std 1. In a group of equal rewards every A is exactly 0, rather
    than the rounding of the mean divided by 1e-6. Without `norm_adv_by_std_in_grpo`, A_i = R_i - mean(R): Dr. GRPO
    (arXiv:2503.20783, section 3.2).
    """
    groups = _groups(batch, n)
    centred = _centred(groups, groups.totals, groups.mean(groups.totals))
    if config.norm_adv_by_std_in_grpo:
        centred = centred / (groups.std(centred.square()) + EPSILON)[groups.group]
    return _spread(batch, groups, centred)


def rloo(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Estimate:
    """RLOO (arXiv:2402.14740, section 3.2): A_i = R_i - mean of the others' R; A_i = R_i with n = 1."""
    groups = _groups(batch, n)
    others = groups.size / (groups.size - 1).clamp(min=1)
    centred = _centred(groups, groups.totals, groups.mean(groups.totals))
    return _spread(batch, groups, others[groups.group] * centred)


def opo(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Estimate:
    """OPO (arXiv:2505.23585, section 3): A_i = R_i - sum(L R) / sum(L), L the policy's tokens of a trajectory.

    A_i = R_i with n = 1.
    """
    groups = _groups(batch, n)
    lengths = torch.zeros_like(groups.totals)
    lengths.index_add_(0, groups.member, segment_sum(batch.mask.double(), batch.offsets))
    weighted = groups.sum(lengths * groups.totals) / groups.sum(lengths).clamp(min=1)
    return _spread(batch, groups, _centred(groups, groups.totals, torch.where(groups.size > 1, weighted, 0.0)))


def grpo_turn(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Estimate:
    """GRPO with credit by turn: a turn answers only for the rewards that come after it began.

    After the process supervision of GRPO (arXiv:2402.03300, section 4.1.3), which gives a token the sum of the
    normalised rewards of the steps from its own on, and turn-level GRPO for tool-using agents (arXiv:2505.11821), which
    compares turn k with turn k of the group. Ours: with G_{i,k} the rewards of trajectory i from its turn k on,
    outcome included,

        c_{i,k} = G_{i,k} - mean_j G_{j, min(k, K_j)}        K_j turns in trajectory j
        A_{i,k} = c_{i,k} / (s + 1e-6)                       s^2 = sum_i mean_k c_{i,k}^2 / (group size - 1)

    A trajectory that has ended is represented by its last turn, so an agent that takes more turns is not rewarded for
    that alone. With rewards only at the end, or with one turn each, this is exactly `grpo`; equal trajectories have
    advantage 0. A turn is a run of policy tokens without a break. `norm_adv_by_std_in_grpo` decides on s as in grpo.
    """
    groups = _groups(batch, n)
    order, offsets = _policy_order(batch, groups)  # P policy tokens, trajectory by trajectory
    first = ~batch.mask[order - 1]  # [P] bool: opens a turn; a sequence never begins with a policy token
    turn = first.long().cumsum(0) - 1  # [P], counted over the batch
    owner = segment_ids(offsets)[first]  # [turns], trajectory
    turns = torch.bincount(owner, minlength=len(groups.totals))  # [M]
    to_go = suffix_sums(batch.rewards[order], offsets, 1.0)[first]  # [turns]

    start = turns.cumsum(0) - turns  # [M], the trajectory's first turn
    width = int(turns.max()) if len(owner) else 0
    column = torch.arange(width, device=turns.device).minimum((turns - 1).clamp(min=0)[:, None])  # [M, width]
    table = torch.where(turns[:, None] > 0, to_go[(start[:, None] + column).clamp(max=len(to_go) - 1)], 0.0)
    for k in range(width):
        table[:, k] = _centred(groups, table[:, k], groups.mean(table[:, k]))

    own = table[owner, torch.arange(len(owner), device=turns.device) - start[owner]]  # [turns]
    if config.norm_adv_by_std_in_grpo:
        squares = torch.zeros_like(groups.totals).index_add_(0, owner, own.square()) / turns.clamp(min=1)
        own = own / (groups.std(squares) + EPSILON)[groups.group][owner]
    advantages = torch.zeros(batch.num_tokens, dtype=torch.float64, device=own.device)
    advantages[order] = own[turn]
    return advantages, advantages


def reinforce_plus_plus(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Estimate:
    """REINFORCE++ (arXiv:2501.03262): the discounted rewards from a token on, whitened over the batch's policy tokens.

    R_t = r_t + gamma * R_{t+1}, t counting policy tokens only, so a long tool answer discounts nothing.
    """
    order, offsets = _policy_order(batch, _groups(batch, n))
    returns = torch.zeros(batch.num_tokens, dtype=torch.float64, device=batch.rewards.device)
    returns[order] = suffix_sums(batch.rewards[order], offsets, config.gamma)
    return masked_whiten(returns, batch.mask), returns


def gae(batch: RaggedBatch, config: AlgorithmConfig, n: int) -> Estimate:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), whitened over the batch's policy tokens.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  returns = A + V before whitening.
    t counts policy tokens only: the token after the last one before a tool answer is the first one behind it, so
    neither values nor discounts of observed tokens enter.
    """
    assert batch.values is not None, "gae needs the critic's values"
    order, offsets = _policy_order(batch, _groups(batch, n))
    values = batch.values[order].double()
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    following[offsets[1:][offsets.diff() > 0] - 1] = 0.0
    delta = batch.rewards[order].double() + config.gamma * following - values
    raw = torch.zeros(batch.num_tokens, dtype=torch.float64, device=values.device)
    raw[order] = suffix_sums(delta, offsets, config.gamma * config.lam)
    returns = torch.zeros_like(raw)
    returns[order] = raw[order] + values
    return masked_whiten(raw, batch.mask), returns


ESTIMATORS: dict[str, Callable[[RaggedBatch, AlgorithmConfig, int], Estimate]] = {
    "grpo": grpo,
    "grpo_turn": grpo_turn,
    "rloo": rloo,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "gae": gae,
}


def _groups(batch: RaggedBatch, n: int) -> Groups:
    return Groups.of(batch.rewards, batch.offsets, batch.group, batch.trajectory, n)


def _centred(groups: Groups, values: Tensor, baseline: Tensor) -> Tensor:
    """[M] float64: `values` [M] less their group's `baseline` [G].

    Exactly 0 where a group's values are equal, and where the group teaches nothing.
    """
    nothing = groups.equal(values) | ~groups.teaches
    return torch.where(nothing[groups.group], 0.0, values - baseline[groups.group])


def _spread(batch: RaggedBatch, groups: Groups, advantage: Tensor) -> Estimate:
    """Give every policy token its trajectory's `advantage` [M]; the returns of an outcome estimator are the same."""
    advantages = torch.where(batch.mask, advantage[groups.member][segment_ids(batch.offsets)], 0.0)
    return advantages, advantages


def _policy_order(batch: RaggedBatch, groups: Groups) -> tuple[Tensor, Tensor]:
    """([P] positions of the policy tokens, trajectory by trajectory and in order, [M + 1] offsets into them)."""
    positions = torch.nonzero(batch.mask).flatten()
    owner = groups.member[segment_ids(batch.offsets)[positions]]
    order = positions[torch.argsort(owner, stable=True)]
    offsets = torch.zeros(len(groups.totals) + 1, dtype=torch.int64, device=positions.device)
    torch.cumsum(torch.bincount(owner, minlength=len(groups.totals)), 0, out=offsets[1:])
    return order, offsets
