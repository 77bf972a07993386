"""Sharding over the ranks of a process group with FSDP2; with one rank a no-op."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from agentrl.parallel.mesh import Mesh
from agentrl.parallel.tensor_parallel import split_layers


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """List the repeated blocks of `model`, which FSDP gathers one at a time; before `shard`, which changes classes."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(root: nn.Module, model: PreTrainedModel, mesh: Mesh, *, autocast: bool = False) -> set[str]:
    """Shard `root`, a module around `model`, in place over `mesh`: each decoder layer for itself, then the rest.

    Only `root`'s own forward gathers the embeddings and the head, so every forward must go through it. With `autocast`
    (to bfloat16) the layers are gathered in bfloat16, and gradients are added up in float32. Returns the result of
    `split_layers`. Raises ConfigError when the model's heads cannot be handed out so.
    """
    if mesh.fsdp is None:
        return set()
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    mesh.parallel.check_heads(heads, getattr(config, "num_key_value_heads", None) or heads)
    partial = set() if mesh.tensor is None else split_layers(model, mesh.tensor)
    # What autocast leaves in float32, the sums of a layer's outputs for one, is to stay so: inputs are not cast.
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh.fsdp, mp_policy=precision if autocast else MixedPrecisionPolicy())
    fully_shard(root, mesh=mesh.fsdp)
    return partial
