"""Sums over sequences and statistics over a mask, for tokens laid out without padding."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_ids(offsets: Tensor, tokens: int | None = None) -> Tensor:
    """Index of the sequence that each token belongs to, [T] int64; offsets [N + 1] int64.

    tokens: T, where it is known: else it is read from the device, which is waited for.
    """
    rows = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=tokens)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum `values` [T] float over each sequence: [N] of the same dtype, 0 for an empty one; differentiable.

    A reduction by segment rather than a scattered addition, so that a GPU repeats it bit for bit.
    """
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0.0)


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    """Find the largest of `values` [T] float in each sequence: [N] of the same dtype, -inf for an empty one."""
    return torch.segment_reduce(values, "max", offsets=offsets, initial=-torch.inf)


def following(values: Tensor, offsets: Tensor) -> Tensor:
    """Take for each of `values` [T] the next one of its sequence: [T] of the same dtype, 0 after the last."""
    shifted = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    shifted[offsets[1:][offsets.diff() > 0] - 1] = 0.0
    return shifted


def suffix_sums(values: Tensor, offsets: Tensor, discount: float | Tensor) -> Tensor:
    """Compute y[t] = values[t] + discount * y[t + 1] [T] float64, separately in every sequence; values [T] float.

    discount: one number, or [T] float64 with one for each sequence.

    By doubling: after step k an entry covers the 2**k tokens from its own on. A sequence of L tokens takes log2(L)
    passes over the whole batch in place of L.
    """
    result = values.double()
    if result.numel() == 0:
        return result
    position = torch.arange(result.numel(), device=result.device)
    end = torch.repeat_interleave(offsets[1:], offsets.diff())
    reach, longest = 1, int(offsets.diff().max())
    while reach < longest:
        ahead = position + reach
        tail = torch.where(ahead < end, result[ahead.clamp(max=result.numel() - 1)], 0.0)
        result = result + discount**reach * tail
        reach *= 2
    return result


def by_role(indices: Tensor, role: Tensor | None) -> Tensor:
    """Number the pairs of `indices` and `role`, [N] int64 each, from 0: [N] int64. None: all have one role."""
    pairs = indices[:, None] if role is None else torch.stack([indices, role], 1)
    return torch.unique(pairs, dim=0, return_inverse=True)[1]


def sum_by(owner: Tensor, values: Tensor) -> Tensor:
    """Add up `values` [N] by `owner` [N] int64, which counts from 0 without a gap: [M], of the dtype of `values`."""
    return values.new_zeros(int(owner.max()) + 1 if len(owner) else 0).index_add_(0, owner, values)


def observed(mask: Tensor, offsets: Tensor) -> Tensor:
    """Mark the tokens that the policy reads after its first one in their sequence: [T] bool.

    They are the answers of tools and environments, a user's further turns, and the template around them. mask [T] bool,
    offsets [N + 1] int64.
    """
    sampled = mask.long().cumsum(0)
    before = torch.cat([sampled.new_zeros(1), sampled])[offsets[:-1]]
    return ~mask & (sampled > before[segment_ids(offsets, len(mask))])


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum `values` [T] float where `mask` [T] bool: scalar."""
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average `values` [T] float where `mask` [T] bool: scalar, 0 when the mask is empty."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale `values` [T] float to mean 0 and unbiased variance 1 over `mask` [T] bool; 0 where it is False.

    (v - mean) / sqrt(var + 1e-8), computed in float64 so that equal values give 0 and not the rounding of their
    mean times 1e4. A single value has no variance and gives 0.
    """
    wide = torch.where(mask, values.double(), 0.0)
    count = mask.sum()
    centred = torch.where(mask, wide - wide.sum() / count.clamp(min=1), 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + 1e-8)).to(values.dtype)
