"""Floating point operations of an update whose prompts are computed once, over those with a prompt for each answer.

    python -m benchmarks.training.shared_flops [--shape 0.5B] [--length 2048]

A forward and backward pass over one prompt and its n answers, in one of Qwen2.5's shapes. torch counts all products on
pretended tensors, without weights. Attention is counted by the blocks of 128 x 128 tokens that a device computes:
two products forward, five backward. Only answers need the head, in either way.
"""

from __future__ import annotations

import argparse

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agentrl.model.attend import Rule
from agentrl.model.attention import BLOCK, IMPLEMENTATION, PackedAttention, block_mask
from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.model.packed import forward_packed, token_logits
from agentrl.model.tree_layout import tree_layout
from agentrl.planning.sizing import ModelShape
from benchmarks.gpu.shared import SHARES, groups
from benchmarks.training.update_utilization import SHAPES

ANSWERS = (4, 8, 16)


class _CountedAttention(PackedAttention):
    """Counts the operations of attention, and computes nothing."""

    def __init__(self, layout: PackedLayout) -> None:
        super().__init__(layout)
        counts, _, whole_counts, _ = block_mask(layout, None).as_tuple()[2:6]
        self.pairs = int(counts.sum() + whole_counts.sum()) * BLOCK**2
        self.flops = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Count a forward and a backward pass: query [H, P, D], key and value [K, P, D] -> [P, H, D]."""
        heads, _, width = query.shape
        self.flops += (2 + 5) * 2 * heads * width * self.pairs
        groups = heads // key.shape[0]
        return (query + (key + value).repeat_interleave(groups, dim=0)).transpose(0, 1)  # gradients reach all three


def empty_policy(shape: ModelShape) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
    )
    model: PreTrainedModel = Qwen2ForCausalLM._from_config(config, attn_implementation=IMPLEMENTATION)
    return model


def update_flops(shape: ModelShape, layout: PackedLayout, answers: int) -> tuple[int, int]:
    """Operations of a forward and backward pass, and those of attention among them; `answers` tokens are scored."""
    attention = _CountedAttention(layout)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model, places = empty_policy(shape), torch.zeros(len(layout.stored), dtype=torch.int64)
        hidden = forward_packed(model, places, places, attention)
        token_logits(model, hidden[:1].expand(answers, -1)).sum().backward()
    return counter.get_total_flops() + attention.flops, attention.flops


def ratios(shape: ModelShape, n: int, share: float, length: int) -> dict[str, float]:
    """Shared over flat: tokens computed, operations of attention, all operations."""
    batch = groups(shape, 1, share, length, n)
    answers = int(batch.mask.sum())
    flat = update_flops(shape, flat_layout(batch.offsets, batch.ids.device), answers)
    layout = tree_layout(batch.ids, batch.offsets)
    shared = update_flops(shape, layout, answers)
    return {
        "tokens": len(layout.stored) / batch.num_tokens,
        "attention": shared[1] / flat[1],
        "update": shared[0] / flat[0],
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--length", type=int, default=2048, help="mean tokens of a prompt and its answer")
    args = parser.parse_args(words)
    print("| answers | prompt, part of a sequence | tokens computed | attention | update |\n|---|---|---|---|---|")
    for n in ANSWERS:
        for share in SHARES:
            found = ratios(SHAPES[args.shape], n, share, args.length)
            cells = " | ".join(f"{found[name]:.2f}" for name in ("tokens", "attention", "update"))
            print(f"| {n} | {share:.0%} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
