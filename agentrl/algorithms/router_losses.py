"""Losses of the routers of a mixture of experts, in addition to the policy loss: balance, and small logits.

Both are sums over the L layers with experts, as where they come from (arXiv:2101.03961, arXiv:2202.08906) and in
Megatron. The balancing loss of a layer is E sum_e f_e p_e, with f_e the share of the choices that fell on expert e of
E, and p_e its mean probability. It is 1 where all are used alike. f is counted over the whole mini-batch before its
first micro-batch, and no gradient flows through it. So the loss is a mean over tokens, and parts add up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RouterLosses(NamedTuple):
    """A micro-batch's share of both losses: scalars with gradient."""

    balance: torch.Tensor
    z: torch.Tensor


def router_losses(sums: torch.Tensor, shares: torch.Tensor, tokens: int) -> RouterLosses:
    """Compute the losses of some tokens of a mini-batch that has `tokens` in all.

    sums: [L, E + 1] float32, `TokenScores.router` of these tokens. shares: [L, E] float32, f of the mini-batch.
    """
    experts = shares.shape[1]
    balance = experts * (shares * sums[:, :experts]).sum()
    return RouterLosses(balance / max(tokens, 1), sums[:, experts].sum() / max(tokens, 1))


def expert_counts(experts: torch.Tensor, layers: int, count: int) -> torch.Tensor:
    """Count the tokens that were sent to each expert: experts [T, L, k] of an integer type -> [L, E] int64.

    The shape may be [0] where there is no token.
    """
    flat = experts.reshape(len(experts), layers, -1) if len(experts) else experts.new_zeros(0, layers, 1)
    numbered = flat.long() + count * torch.arange(layers, device=experts.device)[:, None]
    return torch.bincount(numbered.flatten(), minlength=layers * count).view(layers, count)
