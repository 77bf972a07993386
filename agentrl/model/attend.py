"""Attention of queries to keys: a layer's rule, and the products that carry it out on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from agentrl.model.layout import PackedLayout

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


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
        return flash_forward(query, key, value, 0.0, False, attn_mask=mask, scale=rule.scale)
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
