"""Policies of random weights, and what one that learns on a single device takes of its memory (docs/scale.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agentrl.model import packed
from agentrl.plan import sizing
from agentrl.plan.sizing import BFLOAT16, ModelShape
from agentrl.trajectory.batch import RaggedBatch
from benchmarks.gpu.part import free, model_folder
from benchmarks.training.update_utilization import make_policy

CHUNK_LOGITS = 1 << 27
"""Logits alive at once on a GPU."""


def states(shape: ModelShape) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer."""
    return sizing.state_bytes(shape.params, 1, trained=True)


def update_bytes(
    shape: ModelShape, tokens: int, *, autocast: bool, recompute: bool = True, offload_activations: bool = False
) -> dict[str, float]:
    """At the fullest moment of an update in micro-batches of `tokens`, when all of these are there.

    On one device nothing is gathered; instead autocast keeps its bfloat16 copy of each matrix until the forward pass
    has ended.
    """
    kept = sizing.activation_bytes(
        shape, tokens, autocast=autocast, recomputed=shape.layers if recompute else 0, offload=offload_activations
    )
    casts = BFLOAT16 * (shape.layers * shape.layer_params + shape.head_params) if autocast else 0
    logits = sizing.logits_bytes(shape, tokens, CHUNK_LOGITS)
    return states(shape) | {"casts": float(casts), "activations": kept, "logits": logits}


def fitting(shape: ModelShape, tokens: int, room: float, *, autocast: bool) -> ModelShape:
    """The shape with as many of its layers as an update has room for, in bytes; at least one."""
    for layers in range(shape.layers, 1, -1):
        fewer = replace(shape, layers=layers)
        if sum(update_bytes(fewer, tokens, autocast=autocast).values()) <= room:
            return fewer
    return replace(shape, layers=1)


@contextmanager
def logits_at_once(count: int) -> Iterator[None]:
    """Let so many logits exist at once during the block, on either device."""
    before = packed.CHUNK_LOGITS, packed.CHUNK_LOGITS_ON_GPU
    packed.CHUNK_LOGITS = packed.CHUNK_LOGITS_ON_GPU = count
    try:
        yield
    finally:
        packed.CHUNK_LOGITS, packed.CHUNK_LOGITS_ON_GPU = before


def made_once(batch: RaggedBatch, chunk: int) -> float:
    """Compute the part of the scored tokens whose logits are made once where the head works in parts: of sequences
    that fit into a chunk of so many tokens."""
    scored = batch.policy_tokens
    return float(scored[scored <= chunk].sum() / scored.sum())


@contextmanager
def policy_folder(shape: ModelShape, device: str) -> Iterator[Path]:
    """A temporary folder with a policy of random weights."""
    with model_folder() as folder:
        make_policy(shape, folder, device)
        free()
        yield folder
