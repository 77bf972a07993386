"""Attention over a prefix tree, by the flash attention that torch has for CPUs."""

from __future__ import annotations

from typing import Protocol

import torch

from agentrl.model.attend import Rule, attend_part, flash_forward, join_parts, sink_share
from agentrl.model.layout import PackedLayout

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Context(Protocol):
    layout: PackedLayout
    scale: float

    @property
    def saved_tensors(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Query, key, value, sinks, the output [P, K, H / K, D], and its log-sum-exp [P, K, H / K] float32."""
        ...

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep for `saved_tensors`: query [H, P, D], key and value [K, P, D], sinks [H], output and log-sum-exp."""
        ...


class TreeAttention(torch.autograd.Function):
    """Attention over a prefix tree on the CPU, without padding and without a mask.

    query [H, P, D], key and value [K, P, D], sinks [H] or None -> [P, H, D].

    Each node's tokens attend causally to their own node, and in one further call for each shared node all tokens below
    it attend to its keys. The parts of one token are joined by their log-sum-exp, as blocks of keys are in flash
    attention (arXiv:2205.14135, section 3.1). For the gradient, each part's backward pass runs with the joined output
    and log-sum-exp (ibid., algorithm 4), which gives that part's exact share. Sinks are one more part, of one key
    without a value.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        layout: PackedLayout,
        scale: float,
    ) -> torch.Tensor:
        """Attend: query [H, P, D], key and value [K, P, D], sinks [H] or None -> [P, H, D]."""
        rule = Rule(scale)
        q, k, v = _by_kv_head(query, key, value)
        kv_heads, groups, size, _ = q.shape
        output = q.new_empty(size, kv_heads, groups, q.shape[-1])
        lse = q.new_empty(size, kv_heads, groups, dtype=torch.float32)
        out, total = output.permute(1, 2, 0, 3), lse.permute(1, 2, 0)
        for start, end in layout.spans:
            own = (slice(None), slice(None), slice(start, end))
            out[own], total[own] = flash_forward(q[own], k[own], v[own], 0.0, True, scale=scale)
        # Children follow their node, so the queries below a node are one slice, for any branches.
        for first, last, start, end in layout.shared:
            below, above = (slice(None), slice(None), slice(first, last)), (slice(None), slice(None), slice(start, end))
            join_parts(out[below], total[below], *attend_part(q[below], k[above], v[above], None, rule))
        if sinks is not None:
            by_head = sinks.float().view(kv_heads, groups)
            output.mul_(sink_share(lse, by_head).unsqueeze(-1))
            lse = torch.logaddexp(lse, by_head)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.layout, ctx.scale = layout, scale
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query [H, P, D], key and value [K, P, D] and sinks [H] from the output's gradient, [P, H, D]."""
        query, key, value, sinks, output, lse = ctx.saved_tensors
        q, k, v = _by_kv_head(query, key, value)
        out, total = output.permute(1, 2, 0, 3), lse.permute(1, 2, 0)
        grad_out = grad.contiguous().view_as(output).permute(1, 2, 0, 3)
        grads = tuple(torch.empty_like(output).permute(1, 2, 0, 3) for _ in range(3))
        dq, dk, dv = grads
        for start, end in ctx.layout.spans:
            own = (slice(None), slice(None), slice(start, end))
            dq[own], dk[own], dv[own] = _flash_backward(
                grad_out[own], q[own], k[own], v[own], out[own], total[own], 0.0, True, scale=ctx.scale
            )
        for first, last, start, end in ctx.layout.shared:
            below, above = (slice(None), slice(None), slice(first, last)), (slice(None), slice(None), slice(start, end))
            parts = _flash_backward(
                grad_out[below], q[below], k[above], v[above], out[below], total[below], 0.0, False, scale=ctx.scale
            )
            for whole, place, part in zip(grads, (below, above, above), parts, strict=True):
                whole[place] += part
        d_sinks = None
        if sinks is not None:
            # A sink has weight exp(sink - lse) and value 0, so its score's gradient is -weight * (grad . output).
            share = (sinks.float().view(lse.shape[1:]) - lse).exp()
            d_sinks = -(share * (grad.view_as(output) * output).float().sum(-1)).sum(0).flatten().to(sinks.dtype)
        return dq.flatten(0, 1), dk.sum(1), dv.sum(1), d_sinks, None, None


def _by_kv_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group heads without copying: query [H, P, D], key and value [K, P, D] -> all [K, H / K, P, D]."""
    shape = (key.shape[0], query.shape[0] // key.shape[0], -1, -1)
    return query.unflatten(0, shape[:2]), key[:, None].expand(shape), value[:, None].expand(shape)
