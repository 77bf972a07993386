"""Sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509): the ranks of a group split the tokens of a packed row.

Each rank runs the model on its slice of the stored tokens. Only attention needs the others: there the ranks exchange
tokens for heads, so that each attends over all tokens with its part of the heads, and exchange back. Scores of tokens
are made where the tokens are and then given to all ranks. Every rank has the same loss and sends its gradient through
its own slice: the gradients of the parameters are parts of a sum over the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from agentrl.model.attend import Rule
from agentrl.model.attention import AttentionLayout, Mixer


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's stored tokens [first, first + width) of P. The last slices may reach beyond P and are padded."""

    size: int
    """P, the number of stored tokens of all ranks."""
    first: int
    width: int
    group: dist.ProcessGroup | None

    @staticmethod
    def from_group(size: int, group: dist.ProcessGroup | None) -> Slice:
        """Take this rank's part of `size` tokens, equal for all ranks of `group`; all of them without a group."""
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        width = -(-size // ranks)
        return Slice(size, rank * width, width, group)

    def cut(self, row: torch.Tensor) -> torch.Tensor:
        """Cut out this rank's part, with zeros beyond the end: [P] -> [width], or [S, P] -> [S, width]."""
        part = row[..., self.first : self.first + self.width]
        return pad(part, (0, self.width - part.shape[-1]))

    def holds(self, places: torch.Tensor) -> torch.Tensor:
        """Mark the stored tokens `places` [M] int64 that are this rank's -> [M] bool."""
        return (places >= self.first) & (places < self.first + self.width)

    def spread(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the values of all ranks' tokens on every rank: [..., width] -> [..., P]. Differentiable."""
        if self.group is None:
            return part
        row = pad(part, (self.first, self.group.size() * self.width - self.first - self.width))
        return self.sum_over_ranks(row[..., : self.size])

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values [..., T], zero except at this rank's tokens, over the ranks. Differentiable."""
        return values if self.group is None else _SumOverRanks.apply(values, self.group)

    def attention(self, whole: AttentionLayout) -> AttentionLayout:
        """Wrap the attention over all tokens, so that it can be given the tokens of the slice."""
        return whole if self.group is None else _UlyssesAttention(whole, self, self.group)


class _UlyssesAttention:
    """Attention between two exchanges: outside a rank holds H heads of `width` tokens, inside H / ranks of all."""

    def __init__(self, whole: AttentionLayout, part: Slice, group: dist.ProcessGroup) -> None:
        self._whole, self._part, self._group = whole, part, group

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """query [H, width, D], key and value [K, width, D] -> [width, H, D]."""
        ranks, part = self._group.size(), self._part
        repeats = ranks // math.gcd(key.shape[0], ranks)  # each rank needs whole heads of keys and values
        key, value = (x.repeat_interleave(repeats, dim=0) if repeats > 1 else x for x in (key, value))
        shapes = [(x.shape[0] // ranks, part.width, x.shape[2]) for x in (query, key, value)]
        sent = torch.cat([x.reshape(ranks, -1) for x in (query, key, value)], dim=1)
        taken = _Exchange.apply(sent, self._group).split([math.prod(shape) for shape in shapes], dim=1)
        q, k, v = (
            x.unflatten(1, shape).transpose(0, 1).flatten(1, 2)[:, : part.size]
            for x, shape in zip(taken, shapes, strict=True)
        )
        if rule.sinks is not None:
            rule = replace(rule, sinks=rule.sinks.unflatten(0, (ranks, -1))[self._group.rank()])
        output = self._whole.attend(layer, q, k, v, rule)  # [P, H / ranks, D]
        output = pad(output, (0, 0, 0, 0, 0, ranks * part.width - part.size))
        back = _Exchange.apply(output.unflatten(0, (ranks, part.width)), self._group)  # [ranks, width, H / ranks, D]
        return back.transpose(0, 1).flatten(1, 2)

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [width, W] -> [width, W]. A state needs the tokens before it: each rank mixes the tokens of all."""
        everyone = _Exchange.apply(hidden.expand(self._group.size(), -1, -1), self._group).flatten(0, 1)
        return self._part.cut(self._whole.mix(mixer, everyone[: self._part.size]).T).T


class _Context(Protocol):
    group: dist.ProcessGroup


class _Exchange(torch.autograd.Function):
    """Exchange entry s of rank r's [ranks, ...] with entry r of rank s's: a permutation that is its own transpose."""

    @staticmethod
    def forward(ctx: _Context, entries: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Exchange entries [R, *] of R ranks -> [R, *]."""
        ctx.group = group
        taken = torch.empty_like(entries, memory_format=torch.contiguous_format)
        dist.all_to_all_single(taken, entries.contiguous(), group=group)
        return taken

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Exchange the gradient [R, *] back."""
        return _Exchange.forward(ctx, grad, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks that all compute the same loss from it, so each rank keeps its own gradient unsummed."""

    @staticmethod
    def forward(ctx: object, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sum values [T] over the ranks -> [T], or [S, T] alike."""
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass on the gradient [T], or [S, T], as it is."""
        return grad, None
