"""Sharding over the ranks of a process group with FSDP2; without one, or with one rank, everything here is a no-op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agentrl.parallel.tensor_parallel import split_layers

if TYPE_CHECKING:
    from agentrl.parallel.mesh import Mesh


def world_size() -> int:
    """Ranks that share the work of an update; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of `model`, which FSDP gathers one at a time. Ask before `shard`, which changes classes."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(root: nn.Module, model: PreTrainedModel, mesh: Mesh, *, autocast: bool = False) -> set[str]:
    """Shard `root`, a module around `model`, in place over `mesh`: each decoder layer for itself, then the rest.

    Only `root`'s own forward gathers the embeddings and the head, so every forward must go through it. With `autocast`
    (to bfloat16) the layers are gathered in bfloat16, and gradients are added up in float32. Returns what
    `split_layers` does. Raises ConfigError when the model's heads cannot be handed out so.
    """
    if mesh.fsdp is None:
        return set()
    mesh.parallel.check_heads(*_heads(model))
    partial = set() if mesh.tensor is None else split_layers(model, mesh.tensor)
    # What autocast leaves in float32, the sums of a layer's outputs for one, is to stay so: inputs are not cast.
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh.fsdp, mp_policy=precision if autocast else MixedPrecisionPolicy())
    fully_shard(root, mesh=mesh.fsdp)
    return partial


def _heads(model: PreTrainedModel) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    config = model.config.get_text_config()
    return config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a sharded one; every rank must ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`tensor`, of which every rank holds the whole, on the device of `param` and sharded as `param` is."""
    tensor = tensor.to(param.device)
    if not isinstance(param, DTensor):
        return tensor
    return distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)


def all_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` over the ranks, on every rank. In place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_gather(values: torch.Tensor) -> torch.Tensor:
    """[ranks, ...]: the `values` of every rank, which have one shape."""
    if world_size() == 1:
        return values[None]
    gathered = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(gathered, values)
    return torch.stack(gathered)


def all_max(value: int, device: torch.device) -> int:
    """The largest of the ranks' values."""
    if world_size() == 1:
        return value
    box = torch.tensor(value, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box)
