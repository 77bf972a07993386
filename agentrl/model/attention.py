"""Attention of packed sequences: the function that Hugging Face models call, and how it runs on each device.

The model is fed one row of packed tokens; a layout object travels to every layer through the forward's keyword
arguments (which, unlike a context variable, are still there when gradient checkpointing runs the layer again). The
name is registered with transformers as an attention implementation but not as a mask implementation, for which
transformers makes no mask at all.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.model.layout import PackedLayout

IMPLEMENTATION = "agentrl_packed"
LAYOUT = "agentrl_layout"
"""Name of the forward's keyword argument that carries the layout."""

# Keyword arguments of attention functions that change the result and that this one does not implement.
_UNSUPPORTED = ("s_aux", "position_bias", "indices", "is_causal")

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class AttentionLayout(Protocol):
    """What carries out the attention of one forward."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [H, P, D]; key, value [K, P, D] of the P new tokens, H a multiple of K -> [P, H, D]."""
        ...


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function by transformers' convention: query [1, H, P, D], key and value [1, K, P, D].

    Dropout is never applied: the log-probs of sampling and of the update must agree. Raises ValueError when the
    model asks for something that is not implemented, or was called without a layout.
    """
    layout: AttentionLayout | None = kwargs.get(LAYOUT)
    if layout is None:
        raise ValueError(
            f"{type(module).__name__}: attention {IMPLEMENTATION!r} was called without {LAYOUT}; call the model "
            "through agentrl.model.packed, or give it another attention with model.set_attn_implementation('sdpa')"
        )
    wanted = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if wanted or attention_mask is not None:
        raise ValueError(f"{type(module).__name__}: packed attention does not implement {wanted or 'attention_mask'}")
    # Under autocast norms give float32 and projections bfloat16: query and key may have been normed, values are not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if torch.is_autocast_enabled(query.device.type):  # a norm or a rotation in float32 comes before only some of them
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = getattr(module, "layer_idx", 0)
    output = layout.attend(layer, query[0], key[0], value[0], scale, sliding_window, softcap)
    return output[None], None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


class PackedAttention:
    """Causal attention within the sequences of a `PackedLayout`; differentiable."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if window is not None and window >= self.layout.longest:
            window = None
        if softcap is not None or key.shape[-1] != value.shape[-1]:
            return attend_by_node(self.layout, query, key, value, scale, window, softcap)
        if query.is_cuda and query.dtype != torch.float32 and self.layout.is_flat:
            return _attend_cuda(self.layout, query, key, value, scale, window)
        if query.is_cuda or window is not None:
            return attend_by_node(self.layout, query, key, value, scale, window, softcap)
        return _TreeAttention.apply(query, key, value, self.layout, scale)


def _attend_cuda(
    layout: PackedLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    ends = [end for _, end in layout.spans]
    offsets = torch.tensor([0, *ends], dtype=torch.int32, device=query.device)
    output = varlen_attn(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        offsets,
        offsets,
        layout.longest,
        layout.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[0] != key.shape[0],
    )
    assert isinstance(output, torch.Tensor)
    return output


def attend_by_node(
    layout: PackedLayout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Any window and softcap on any device, one node at a time. Shapes as `AttentionLayout.attend`."""
    lengths = [end - start for start, end in layout.spans]
    queries, keys, values = (x.split(lengths, dim=1) for x in (query, key, value))
    outputs = []
    for node, above in enumerate(layout.ancestors):
        if above:
            k = torch.cat([keys[i] for i in (*above, node)], dim=1)
            v = torch.cat([values[i] for i in (*above, node)], dim=1)
        else:
            k, v = keys[node], values[node]
        outputs.append(attend_tail(queries[node], k, v, scale, window, softcap))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def attend_tail(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The last Q of L tokens of one sequence attend causally. query [H, Q, D], key and value [K, L, D] -> [H, Q, D]."""
    new, total = query.shape[1], key.shape[1]
    groups = query.shape[0] // key.shape[0]
    mask = None
    if new != total or window is not None or softcap is not None:
        distance = torch.arange(total - new, total, device=query.device)[:, None]
        distance = distance - torch.arange(total, device=query.device)
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if softcap is None:
        output = scaled_dot_product_attention(
            query[None], key[None], value[None], mask, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
        )
        return output[0]
    scores = torch.matmul(query, key.repeat_interleave(groups, dim=0).transpose(1, 2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    assert mask is not None
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value.repeat_interleave(groups, dim=0))


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of the keys, for `join_parts`: the output [B, H, Q, D] and its log-sum-exp [B, H, Q] float32.

    query [B, H, Q, D], key and value [B, H, L, D], mask additive and broadcastable to [B, H, Q, L].
    """
    if query.device.type == "cpu":
        return _flash_forward(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    return attend_part_plainly(query, key, value, mask, scale)


def attend_part_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_part` as plain products, for few queries on any device."""
    heads = query.shape[:2]
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).float().unflatten(0, heads) * scale
    scores = scores if mask is None else scores + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(value.dtype)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).unflatten(0, heads), lse


def join_parts(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add in place to an output and its log-sum-exp those of the same queries over further keys."""
    share = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.lerp_(part, share.to(out.dtype))
    lse.copy_(torch.logaddexp(lse, part_lse))


class _TreeAttention(torch.autograd.Function):
    """Attention over a prefix tree on the CPU, with no padding and no mask.

    Each node's tokens attend causally to their own node, and in one further call for each shared node all tokens
    below it attend to its keys. The parts of one token are joined by their log-sum-exp, as blocks of keys are in
    flash attention (arXiv:2205.14135, section 3.1); for the gradient each part's backward pass is run with the joined
    output and log-sum-exp (ibid., algorithm 4), which gives that part's exact share.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float
    ) -> torch.Tensor:
        q, k, v = _by_kv_head(query, key, value)
        kv_heads, groups, size, _ = q.shape
        output = q.new_empty(size, kv_heads, groups, q.shape[-1])
        lse = q.new_empty(size, kv_heads, groups, dtype=torch.float32)
        out, total = output.permute(1, 2, 0, 3), lse.permute(1, 2, 0)
        for start, end in layout.spans:
            own = (slice(None), slice(None), slice(start, end))
            out[own], total[own] = _flash_forward(q[own], k[own], v[own], 0.0, True, scale=scale)
        for first, last, start, end in layout.shared:
            below, above = (slice(None), slice(None), slice(first, last)), (slice(None), slice(None), slice(start, end))
            join_parts(out[below], total[below], *attend_part(q[below], k[above], v[above], None, scale))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.layout, ctx.scale = layout, scale
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, output, lse = ctx.saved_tensors
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
        return dq.flatten(0, 1), dk.sum(1), dv.sum(1), None, None


def _by_kv_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [H, P, D], key and value [K, P, D] -> all [K, H / K, P, D], keys and values as views without a copy."""
    shape = (key.shape[0], query.shape[0] // key.shape[0], -1, -1)
    return query.unflatten(0, shape[:2]), key[:, None].expand(shape), value[:, None].expand(shape)
