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
    """The rule by which a layer's queries attend to keys."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Number of tokens that a token sees, itself and those just before it; None: all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: torch.Tensor | None = None
    """[H]: for each head the score of one more key, whose value is zero (arXiv:2309.17453; gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """True for causal softmax attention to all keys."""
        return self.window is None and self.softcap is None and self.sinks is None


def attend_by_node(
    layout: PackedLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Attend by any rule on any device, one node at a time.

    query [H, P, D], key and value [K, P, D] of the layout's P stored tokens -> [P, H, D]. Differentiable.
    """
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
    """Attend causally with the last Q of the L tokens of one sequence.

    query [H, Q, D], key and value [K, L, D] -> [H, Q, D]. Differentiable.
    """
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
    """Factor of an output whose keys have the log-sum-exp `lse`, once sinks take their share of the softmax.

    `lse` and `sinks` broadcast to a shape S; the result [S] is exp(lse) / (exp(lse) + exp(sinks)) in float32.
    """
    return torch.sigmoid(lse.float() - sinks.float())


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to some of the keys, for `join_parts`: output [B, H, Q, D] and its log-sum-exp [B, H, Q] float32.

    query [B, H, Q, D], key and value [B, H, L, D], mask additive and broadcastable to [B, H, Q, L]. The
    caller puts the rule's window into the mask, and adds sinks as a further part.
    """
    if query.device.type == "cpu" and rule.softcap is None:
        return flash_forward(query, key, value, 0.0, False, attn_mask=mask, scale=rule.scale)
    return attend_part_plainly(query, key, value, mask, rule)


def attend_part_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by plain matrix products, which hold all scores: for few queries, on any device.

    query [B, H, Q, D], key and value [B, H, L, D] and the result as in `attend_part`.
    """
    heads = query.shape[:2]
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).float().unflatten(0, heads) * rule.scale
    scores = scores if rule.softcap is None else torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores if mask is None else scores + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(value.dtype)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).unflatten(0, heads), lse


def join_parts(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Join an output and its log-sum-exp, in place, with the results of the same queries over further keys.

    out and part [S, D], lse and part_lse [S] float32, S any shape. By log-sum-exp the two softmaxes are one over all
    keys (arXiv:2205.14135, section 3.1).
    """
    share = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.lerp_(part, share.to(out.dtype))
    lse.copy_(torch.logaddexp(lse, part_lse))
