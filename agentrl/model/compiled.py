"""torch.compile for decoder layers: the operations between their matrix products become a few kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.compiler.config
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from agentrl.errors import ConfigError
from agentrl.model.attention import IMPLEMENTATION, PROGRAMS, packed_attention
from agentrl.model.experts import GROUPED, grouped_experts
from agentrl.model.stateful import stateful_mixers
from agentrl.model.vision import vision_tower
from agentrl.parallel.shard import decoder_layers

TRIED = ("gemma3_text", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Kinds of models (`model_type`) whose compiled layers were compared with the layers as they are: log-probs and
gradients (tests/model/test_compiled.py)."""


def text_layers(model: PreTrainedModel) -> list[nn.Module]:
    """List the decoder layers, without the layers of a vision tower. Call it before `shard`, which changes classes."""
    tower = vision_tower(model)
    inside = set() if tower is None else set(tower.modules())
    return [layer for layer in decoder_layers(model) if layer not in inside]


def compile_layers(layers: Sequence[nn.Module], device: str | torch.device) -> None:
    """Compile each layer by itself and in place, when it is first called; parameters keep their names.

    Layers of a kind share their programs, in which the number of tokens is a symbol: micro-batches of other sizes need
    no others. Attention and the products of experts, whose calls follow the lengths of sequences and the choices of
    routers, run between these programs as they do otherwise.

    Raises ConfigError where torch cannot compile for `device`, and for layers with a state.
    """
    if any(stateful_mixers(layer) for layer in layers):
        raise not_compiled(type(layers[0]).__name__)
    check_compiler(device)
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(packed_attention))
    ExpertsInterface.register(GROUPED, torch.compiler.disable(grouped_experts))
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, PROGRAMS)
    for layer in layers:
        layer.compile(dynamic=True)


def not_compiled(name: str) -> ConfigError:
    """Make the error for layers with a state of the class, or the model, of that name."""
    return ConfigError(
        f"actor_rollout_ref.actor.use_torch_compile=true: layers of {name} have a state, and run sequence by sequence, "
        "which cannot be compiled. Set the key to false"
    )


def check_compiler(device: str | torch.device) -> None:
    """Raise ConfigError where torch cannot compile for `device`."""
    try:
        torch.compile(torch.nn.functional.silu)(torch.ones(8, device=device))
    except RuntimeError as error:
        raise ConfigError(
            f"actor_rollout_ref.actor.use_torch_compile=true: torch cannot compile for {device} here: {error}\n"
            "It needs a C++ compiler (g++) on a CPU, and Triton with a C compiler on a GPU. Install it, or set the key "
            "to false"
        ) from error
