"""Floating point operations of an update whose prompts are computed once, over those with a prompt for each answer.

    python -m benchmarks.training.shared_flops [--shape 0.5B] [--length 2048]

A forward and backward pass over one prompt and its n answers, in one of Qwen2.5's shapes: a product for each matrix and
computed token forward, two backward. Attention is counted by the blocks of 128 x 128 tokens that a device computes: two
products forward, five backward. Only answers need the head, in either way.
"""

from __future__ import annotations

import argparse

from agentrl.model.attention import BLOCK, block_mask
from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.model.tree_layout import tree_layout
from agentrl.plan.sizing import ModelShape
from benchmarks.gpu.shared import SHARES, groups
from benchmarks.training.update_utilization import SHAPES

ANSWERS = (4, 8, 16)


def matrix_flops(shape: ModelShape, tokens: int, answers: int) -> int:
    """Operations of all matrices: layers for the computed tokens, the head for those of answers."""
    return 6 * (tokens * shape.layers * shape.layer_params + answers * shape.hidden * shape.vocab)


def attention_flops(shape: ModelShape, layout: PackedLayout) -> int:
    counts, _, whole_counts, _ = block_mask(layout, None).as_tuple()[2:6]
    assert counts is not None and whole_counts is not None
    pairs = int(counts.sum() + whole_counts.sum()) * BLOCK**2
    return (2 + 5) * 2 * shape.layers * shape.q_dim * pairs


def ratios(shape: ModelShape, n: int, share: float, length: int) -> dict[str, float]:
    """Shared over flat: tokens computed, operations of attention, all operations."""
    batch = groups(shape, 1, share, length, n)
    answers = int(batch.mask.sum())
    flat, tree = flat_layout(batch.offsets, batch.ids.device), tree_layout(batch.ids, batch.offsets)
    attention = [attention_flops(shape, layout) for layout in (tree, flat)]
    matrices = [matrix_flops(shape, len(layout.stored), answers) for layout in (tree, flat)]
    return {
        "tokens": len(tree.stored) / len(flat.stored),
        "attention": attention[0] / attention[1],
        "update": (attention[0] + matrices[0]) / (attention[1] + matrices[1]),
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
