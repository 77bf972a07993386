"""Attention of packed sequences: the function that Hugging Face models call, and how it runs on each device.

The model is fed one row of packed tokens; a layout object travels to every layer through the forward's keyword
arguments (which, unlike a context variable, are still there when gradient checkpointing runs the layer again). The
name is registered with transformers as an attention implementation but not as a mask implementation, for which
transformers makes no mask at all.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.model.layout import PackedLayout

IMPLEMENTATION = "agentrl_packed"
LAYOUT = "agentrl_layout"
"""Name of the forward's keyword argument that carries the layout."""

# Keyword arguments of attention functions that change the result and that this one does not implement.
_UNSUPPORTED = ("position_bias", "indices")

# torch 2.11 takes fewer heads of keys than of queries as they come; later ones have to be told of them.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """How the queries of a layer attend to the keys."""

    scale: float
    """Of the scores."""
    window: int | None = None
    """A token sees so many, itself and those just before it; None: all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: torch.Tensor | None = None  # [H]
    """For each head the score of one more key, whose value is zero (arXiv:2309.17453; gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.softcap is None and self.sinks is None


class AttentionLayout(Protocol):
    """What carries out the attention of one forward."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
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
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function by transformers' convention: query and key [1, H or K, P, D], value [1, K, P, E].

    Keys and values of different width (multi-head latent attention) are filled up with zeros, which change nothing.
    Dropout is never applied: the log-probs of sampling and of the update must agree. Raises ValueError when the
    model asks for something that is not implemented, or was called without a layout.
    """
    layout: AttentionLayout | None = kwargs.get(LAYOUT)
    if layout is None:
        raise ValueError(
            f"{type(module).__name__}: attention {IMPLEMENTATION!r} was called without {LAYOUT}: either the model was "
            "not called through agentrl.model.packed (for that, model.set_attn_implementation('sdpa')), or its layers "
            "do not hand the forward's keyword arguments to their attention"
        )
    wanted = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        wanted.append("attention_mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        wanted.append("attention to later tokens")
    if wanted:
        raise ValueError(f"{type(module).__name__}: packed attention does not implement {', '.join(wanted)}")
    # Under autocast norms give float32 and projections bfloat16: query and key may have been normed, values are not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if torch.is_autocast_enabled(query.device.type):  # a norm or a rotation in float32 comes before only some of them
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width, wide = value.shape[-1], max(key.shape[-1], value.shape[-1])
    query, key, value = (x if x.shape[-1] == wide else pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    layer: int = getattr(module, "layer_idx", 0)
    rule = Rule(scale, sliding_window, softcap, s_aux)
    output = layout.attend(layer, query[0], key[0], value[0], rule)
    return output[None, ..., :width].contiguous(), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


class PackedAttention:
    """Causal attention within the sequences of a `PackedLayout`; differentiable."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self._block_masks: dict[int | None, BlockMask] = {}
        self._offsets: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        if rule.window is not None and rule.window >= self.layout.longest:
            rule = Rule(rule.scale, None, rule.softcap, rule.sinks)
        if query.is_cuda and query.dtype != torch.float32 and self.layout.is_flat:
            if rule.softcap is not None or rule.sinks is not None:
                mask = self._block_mask(rule.window, query.device)
                return attend_flex(query, key, value, rule, mask, _compiled_flex())
            if query.shape[-1] % 8 == 0 and query.shape[-1] <= 256:  # what the kernel takes
                return self._attend_cuda(query, key, value, rule)
        if query.is_cuda or rule.window is not None or rule.softcap is not None:
            return attend_by_node(self.layout, query, key, value, rule)
        return _TreeAttention.apply(query, key, value, rule.sinks, self.layout, rule.scale)

    def _attend_cuda(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> torch.Tensor:
        layout = self.layout
        if self._offsets is None:  # once for all layers: the copy waits until the device has done all work before it
            ends = [end for _, end in layout.spans]
            self._offsets = torch.tensor([0, *ends], dtype=torch.int32, device=query.device)
        output = varlen_attn(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            self._offsets,
            self._offsets,
            layout.longest,
            layout.longest,
            scale=rule.scale,
            window_size=(-1 if rule.window is None else rule.window - 1, 0),
            **_GROUPED,
        )
        assert isinstance(output, torch.Tensor)
        return output

    def _block_mask(self, window: int | None, device: torch.device) -> BlockMask:
        if window not in self._block_masks:
            self._block_masks[window] = flat_block_mask(self.layout, window, device)
        return self._block_masks[window]


def flat_block_mask(layout: PackedLayout, window: int | None, device: torch.device) -> BlockMask:
    """What each token of a flat layout sees, for `attend_flex`."""
    lengths = torch.tensor([end - start for start, end in layout.spans], device=device)
    size = len(layout.stored)
    sequence = torch.repeat_interleave(lengths, output_size=size)

    def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        inside = (sequence[query] == sequence[key]) & (query >= key)
        return inside if window is None else inside & (query - key < window)

    return create_block_mask(seen, None, None, size, size, device=device)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def attend_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: Rule,
    mask: BlockMask,
    flex: Callable[..., Any] = flex_attention,
) -> torch.Tensor:
    """Any rule by torch's flex attention, whose `mask` holds the window. Shapes as `AttentionLayout.attend`."""

    def capped(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        assert rule.softcap is not None
        return rule.softcap * torch.tanh(score / rule.softcap)

    output, beside = flex(
        query[None],
        key[None],
        value[None],
        score_mod=None if rule.softcap is None else capped,
        block_mask=mask,
        scale=rule.scale,
        enable_gqa=query.shape[0] != key.shape[0],
        return_aux=AuxRequest(lse=True),
    )
    if rule.sinks is not None:
        output = output * sink_share(beside.lse[..., None], rule.sinks[:, None, None]).to(output.dtype)
    return output[0].transpose(0, 1)


def attend_by_node(
    layout: PackedLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Any rule on any device, one node at a time. Shapes as `AttentionLayout.attend`."""
    lengths = [end - start for start, end in layout.spans]
    queries, keys, values = (x.split(lengths, dim=1) for x in (query, key, value))
    outputs = []
    for node, above in enumerate(layout.ancestors):
        if above:
            k = torch.cat([keys[i] for i in (*above, node)], dim=1)
            v = torch.cat([values[i] for i in (*above, node)], dim=1)
        else:
            k, v = keys[node], values[node]
        outputs.append(attend_tail(queries[node], k, v, rule))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def attend_tail(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The last Q of L tokens of one sequence attend causally. query [H, Q, D], key and value [K, L, D] -> [H, Q, D]."""
    new, total = query.shape[1], key.shape[1]
    groups = query.shape[0] // key.shape[0]
    if query.is_cuda and groups > 1:  # in float32 or with a mask torch would keep all scores in memory
        key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
        groups = 1
    mask = None
    if new != total or not rule.is_plain:
        distance = torch.arange(total - new, total, device=query.device)[:, None]
        distance = distance - torch.arange(total, device=query.device)
        mask = distance >= 0 if rule.window is None else (distance >= 0) & (distance < rule.window)
    if rule.softcap is None and rule.sinks is None:
        output = scaled_dot_product_attention(
            query[None], key[None], value[None], mask, is_causal=mask is None, scale=rule.scale, enable_gqa=groups > 1
        )
        return output[0]
    scores = torch.matmul(query, key.repeat_interleave(groups, dim=0).transpose(1, 2)) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    assert mask is not None
    scores = scores.float().masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    if rule.sinks is not None:
        weights = weights * sink_share(scores.logsumexp(-1, keepdim=True), rule.sinks[:, None, None])
    return torch.matmul(weights.to(query.dtype), value.repeat_interleave(groups, dim=0))


def sink_share(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What is left for the keys of log-sum-exp `lse` beside sinks: the factor of their output. float32."""
    return torch.sigmoid(lse.float() - sinks.float())


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of the keys, for `join_parts`: the output [B, H, Q, D] and its log-sum-exp [B, H, Q] float32.

    query [B, H, Q, D], key and value [B, H, L, D], mask additive and broadcastable to [B, H, Q, L]. The rule's window
    is the caller's to put into the mask, and its sinks are another part.
    """
    if query.device.type == "cpu" and rule.softcap is None:
        return _flash_forward(query, key, value, 0.0, False, attn_mask=mask, scale=rule.scale)
    return attend_part_plainly(query, key, value, mask, rule)


def attend_part_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_part` as plain products, for few queries on any device."""
    heads = query.shape[:2]
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).float().unflatten(0, heads) * rule.scale
    scores = scores if rule.softcap is None else torch.tanh(scores / rule.softcap) * rule.softcap
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
    output and log-sum-exp (ibid., algorithm 4), which gives that part's exact share. Sinks are one more part, of one
    key without a value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        layout: PackedLayout,
        scale: float,
    ) -> torch.Tensor:
        rule = Rule(scale)
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
            join_parts(out[below], total[below], *attend_part(q[below], k[above], v[above], None, rule))
        if sinks is not None:
            by_head = sinks.float().view(kv_heads, groups)
            output.mul_(sink_share(lse, by_head).unsqueeze(-1))
            lse = torch.logaddexp(lse, by_head)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.layout, ctx.scale = layout, scale
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
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
            share = (sinks.float().view(lse.shape[1:]) - lse).exp()
            d_sinks = -(share * (grad.view_as(output) * output).float().sum(-1)).sum(0).flatten().to(sinks.dtype)
        return dq.flatten(0, 1), dk.sum(1), dv.sum(1), d_sinks, None, None


def _by_kv_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [H, P, D], key and value [K, P, D] -> all [K, H / K, P, D], keys and values as views without a copy."""
    shape = (key.shape[0], query.shape[0] // key.shape[0], -1, -1)
    return query.unflatten(0, shape[:2]), key[:, None].expand(shape), value[:, None].expand(shape)
