"""The arithmetic of a training's size: parameters, FLOPs, bytes of memory and bytes that travel. Pure functions.

A decoder layer is counted as in Llama and Qwen: attention with grouped keys and values, a gated MLP (or several, of
which a router picks some). `Counts` of a model's own layers take the place of these formulas (`agentrl.plan.counts`).
Matrices are counted; biases and norms, less than a thousandth, are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from agentrl.system.json_value import JSON

FLOAT32, BFLOAT16 = 4, 2
ADAMW = 2 * FLOAT32
"""Bytes a parameter that learns: first and second moment (arXiv:1711.05101)."""
LOGITS_COPIES = 3
"""Float32 copies of a chunk's logits that are alive at once: themselves, their softmax, their gradient."""


class _Config(BaseModel):
    """The keys of a config.json that are read."""

    model_type: str = ""
    num_hidden_layers: int = Field(0, ge=0)
    hidden_size: int = Field(0, ge=0)
    num_attention_heads: int = Field(0, ge=0)
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = Field(0, ge=0)
    moe_intermediate_size: int | None = None
    vocab_size: int = Field(0, ge=0)
    tie_word_embeddings: bool = False
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    moe_num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_k: int | None = None
    mamba_d_state: int | None = None
    layer_types: list[str] | None = None
    kv_lora_rank: int | None = None
    text_config: _Config | None = None

    def why_not_counted(self) -> str | None:
        """Say what of the model is no decoder of attention and gated MLPs."""
        if missing := [name for name in _SIZES if not getattr(self, name)]:
            return f"has no {', '.join(missing)}"
        if other := sorted(set(self.layer_types or ()) - {"full_attention", "sliding_attention", "chunked_attention"}):
            return f"has layers of {', '.join(other)}"
        if self.mamba_d_state:
            return "has layers of states (mamba_d_state)"
        return "has latent keys and values (kv_lora_rank)" if self.kv_lora_rank else None

    @property
    def experts(self) -> int:
        """Experts that a router chooses from, by any model's name of them; 1 without a router."""
        names = self.num_experts, self.num_local_experts, self.n_routed_experts, self.moe_num_experts
        return next(filter(None, names), 1)


_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of a model as its own code makes it."""

    layers: int
    """Parameters of all decoder layers."""
    active: int
    """Parameters of the layers that a token is multiplied with."""
    outer: int
    """Parameters outside of the layers: embeddings, the head, a vision tower."""
    linear: int
    """Inputs and outputs of the layers' linear modules, added up: a rank of adapters has so many parameters."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Inner width of the MLP; of one expert, where there are several."""
    vocab: int
    tied: bool = False
    """The head is the embedding."""
    qk_norm: bool = False
    experts: int = 1
    experts_per_token: int = 1
    counts: Counts | None = None
    """None: the formulas below count."""
    gated: bool = True
    """The MLP multiplies its activation by a gate."""

    @staticmethod
    def from_config(values: Mapping[str, JSON]) -> ModelShape:
        """Take the shape from a Hugging Face config.json. Raises ValueError for one that is not counted."""
        whole = _Config.model_validate(values)
        config = whole.text_config or whole
        if (why := config.why_not_counted()) is not None:
            raise ValueError(f"{config.model_type or 'the model'} {why}")
        heads = config.num_attention_heads
        experts, each = config.experts, config.num_experts_per_tok or config.moe_k or 1
        own = config.moe_intermediate_size if experts > 1 else None
        return ModelShape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=config.head_dim or config.hidden_size // heads,
            intermediate=own or config.intermediate_size,
            vocab=config.vocab_size,
            tied=config.tie_word_embeddings,
            qk_norm=config.model_type.startswith("qwen3"),
            experts=experts,
            experts_per_token=each if experts > 1 else 1,
        )

    @staticmethod
    def read(path: Path) -> ModelShape:
        """Read the shape from a config.json, or a folder that has one. Raises ValueError, and FileNotFoundError."""
        path = path / "config.json" if path.is_dir() else path
        return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention: projections of queries, keys, values, and back."""
        return 2 * self.hidden * (self.q_dim + self.kv_dim)

    def mlp_params(self, experts: int) -> int:
        """Parameters of one layer's MLP with so many experts: gate, up and down, and the router's row for each."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return experts * 3 * self.hidden * self.intermediate + router

    @property
    def layer_params(self) -> int:
        """Parameters of a layer, of the mean one where they differ."""
        if self.counts is not None:
            return self.counts.layers // self.layers
        return self.attention_params + self.mlp_params(self.experts)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        if self.counts is not None:
            return self.counts.layers + self.counts.outer
        return self.layers * self.layer_params + self.head_params * (1 if self.tied else 2)

    @property
    def backbone_params(self) -> int:
        """Parameters without the head, as a critic has them."""
        return self.params if self.tied else self.params - self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that a token is multiplied with in the layers: N of 2 N D. Looking up an embedding multiplies
        nothing, and the head is counted apart, since only the policy's tokens go through it."""
        if self.counts is not None:
            return self.counts.active
        return self.layers * (self.attention_params + self.mlp_params(self.experts_per_token))

    def lora_params(self, rank: int) -> int:
        """Parameters of adapters A [rank, in], B [out, rank] on every linear layer of the blocks (arXiv:2106.09685)."""
        if self.counts is not None:
            return rank * self.counts.linear
        h, q, kv, i = self.hidden, self.q_dim, self.kv_dim, self.intermediate
        attention = (h + q) + 2 * (h + kv) + (q + h)
        return self.layers * rank * (attention + self.experts * 3 * (h + i))


@dataclass(frozen=True, slots=True)
class Work:
    """Size of a pass: tokens, squared lengths and scored tokens."""

    tokens: float
    squares: float
    """Sum over sequences of their length squared: what causal attention costs follows it."""
    scored: float
    """Tokens whose log-prob is wanted."""

    @staticmethod
    def from_lengths(lengths: Sequence[int], scored: float) -> Work:
        return Work(float(sum(lengths)), float(sum(length * length for length in lengths)), scored)


# FLOPs. Kaplan et al. (arXiv:2001.08361): 2 a weight and token forward, twice that backward.


def attention_flops(shape: ModelShape, work: Work) -> float:
    """Forward: scores and weighted values, 2 x 2 x q_dim for each pair; a causal token sees half of its sequence."""
    return 2.0 * shape.layers * shape.q_dim * work.squares


def head_flops(shape: ModelShape, work: Work) -> float:
    """Forward: the vocabulary's scores of the tokens that need them."""
    return 2.0 * shape.head_params * work.scored


def forward_flops(shape: ModelShape, work: Work) -> float:
    """A log-prob pass."""
    return 2.0 * shape.active_params * work.tokens + attention_flops(shape, work) + head_flops(shape, work)


def update_flops(
    shape: ModelShape, work: Work, *, recompute: float, lora: bool = False, recompute_head: float = 1.0
) -> float:
    """Forward and backward.

    Args:
        recompute: part of the layers that are computed again in the backward pass (activation checkpointing).
        lora: the weights need no gradient of their own, so that the backward pass of the linear layers is halved.
        recompute_head: part of the scored tokens whose logits are made again in the backward pass.
    """
    linear = 2.0 * shape.active_params * work.tokens * (1 + recompute + (1 if lora else 2))
    head = head_flops(shape, work) * (1 + recompute_head + (1 if lora else 2))
    return linear + attention_flops(shape, work) * (3 + recompute) + head


# Memory


def state_bytes(params: int, ranks: int, *, trained: bool, frozen_dtype: int = BFLOAT16) -> dict[str, float]:
    """Bytes of a model's state on one rank under FSDP2 (ZeRO stage 3, arXiv:1910.02054), sharded evenly over `ranks`.

    Parameters that learn are float32, with a gradient and AdamW's moments: 16 bytes each. Others have `frozen_dtype`.
    """
    if not trained:
        return {"weights": params * frozen_dtype / ranks}
    return {
        "weights": params * FLOAT32 / ranks,
        "gradients": params * FLOAT32 / ranks,
        "optimizer": params * ADAMW / ranks,
    }


def gathered_bytes(
    shape: ModelShape, *, dtype: int = FLOAT32, outer: int = FLOAT32, trained: bool = True, cast: bool = True
) -> float:
    """Whole weights that a rank has at the worst moment.

    Embedding and head are there for the length of a pass. There are two layers, one in use and one
    gathered ahead. A model that learns has the gradient of one layer.

    Args:
        dtype: bytes a parameter of a layer that travels.
        outer: bytes a parameter of the embedding and the head, which travel as they are held.
        cast: autocast keeps a bfloat16 copy of the layer in use, too.
    """
    root = shape.head_params * (1 if shape.tied else 2) * outer
    layer = shape.layer_params
    return root + 2 * layer * dtype + (layer * FLOAT32 if trained else 0) + (layer * BFLOAT16 if cast else 0)


def layer_activation_bytes(shape: ModelShape, *, autocast: bool) -> float:
    """A token's bytes that one layer keeps for its backward pass, with transformers' modules and a fused attention.

    After Korthikanti et al. (arXiv:2205.05198), for grouped keys. Two norms keep their inputs and normalised values,
    and linear layers their inputs. Attention keeps queries, keys and values. Four tensors are as wide as a gated MLP:
    gate, its activation, up, and their product; two as another one: up and its activation. Under autocast the norms'
    are float32 and the rest bfloat16. Each linear layer then keeps its own cast of its input.
    """
    h, q, kv, first = shape.hidden, shape.q_dim, shape.kv_dim, 2 if shape.gated else 1
    wide = 2 * first * shape.intermediate * shape.experts_per_token
    normed = q + kv if shape.qk_norm else 0
    if autocast:
        return 4 * 4 * h + 2 * ((3 + first) * h + q) + 2 * (q + 2 * kv) + 2 * wide + 6 * normed
    return FLOAT32 * (4 * h + (2 * h + q) + (q + 2 * kv) + wide + 2 * normed)


def activation_bytes(
    shape: ModelShape, tokens: int, *, autocast: bool, recomputed: int, offload: bool = False
) -> float:
    """Bytes of activations of a micro-batch of `tokens` on this rank.

    The first `recomputed` layers keep their float32 inputs. When the backward pass comes to them, it has freed the
    activations of the others, which leaves room for one layer's. With `offload` the inputs wait in the host's memory.
    """
    whole = max(shape.layers - recomputed, min(recomputed, 1))
    inputs = min(recomputed, 2) if offload else recomputed
    return (whole * layer_activation_bytes(shape, autocast=autocast) + inputs * FLOAT32 * shape.hidden) * tokens


def logits_bytes(shape: ModelShape, tokens: int, chunk_logits: int | None) -> float:
    """Bytes of float32 logits alive at once: of a chunk of `chunk_logits` numbers, or (None) of all scored tokens."""
    alive = shape.vocab * tokens
    return float(LOGITS_COPIES * FLOAT32 * (alive if chunk_logits is None else min(alive, chunk_logits)))


def kv_bytes(shape: ModelShape, *, dtype: int = BFLOAT16) -> int:
    """Bytes of one token in an engine's cache: a key and a value in every layer."""
    return 2 * shape.layers * shape.kv_dim * dtype


def sharded(shape: ModelShape, tp: int, *, dtype: int = BFLOAT16) -> float:
    """An engine's weights on each of `tp` GPUs."""
    return shape.params * dtype / tp


def batch_bytes(tokens: float, token_fields: int = 8) -> float:
    """A ragged batch: int64 ids, a mask, and float32 fields."""
    return tokens * (8 + 1 + FLOAT32 * (token_fields - 2))


# Bytes that travel. A ring over R ranks brings each of them (R - 1) / R of the whole.


def ring(size: float, ranks: int) -> float:
    """Bytes that each rank receives to have all of `size`, or its share of a sum of `size`."""
    return size * (ranks - 1) / ranks


def fsdp_bytes(params: int, ranks: int, micro_batches: int, *, trained: bool, dtype: int = FLOAT32) -> float:
    """Bytes that each rank receives in a pass: all weights for the forward of each micro-batch.

    An update gathers them again for its backward pass, whose gradients (float32) are then summed and scattered.
    """
    one = ring(params * dtype, ranks) * (2 if trained else 1)
    return micro_batches * (one + (ring(params * FLOAT32, ranks) if trained else 0))


def ulysses_bytes(shape: ModelShape, tokens: float, size: int, *, passes: float, dtype: int = BFLOAT16) -> float:
    """Bytes that each of `size` ranks sends for `tokens` tokens that they share (arXiv:2309.14509).

    In each layer queries, keys and values go from parts of the sequence to parts of the heads. The result goes back.
    `passes`: 1 for a forward pass, 2 with its backward, whose gradients take the same ways, 3 with computing again.
    """
    width = 2 * shape.q_dim + 2 * shape.kv_dim
    return passes * shape.layers * (tokens / size) * width * dtype * (size - 1) / size


def sync_bytes(shape: ModelShape, *, dtype: int = BFLOAT16) -> float:
    """Bytes of the weights, sent once, with adapters merged."""
    return float(shape.params * dtype)


def delta_bytes(shape: ModelShape, share: float, *, dtype: int = BFLOAT16) -> float:
    """Bytes of the changed elements, sent once: a value each, and 16 bits for its place."""
    return share * shape.params * (dtype + 2)


def checkpoint_bytes(trained: int) -> float:
    """Bytes of the parameters that learn, and of AdamW's moments."""
    return float(trained * (FLOAT32 + ADAMW))
