"""The ranks of the process group, and their exchanges; with one rank all of it is a no-op."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def world_size() -> int:
    """Count the ranks that share the work of an update; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor [S], of any shape S, whole; every rank must ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor [S], of any shape S; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Shard `tensor` [S], held whole by every rank, as `param` [S] is, on its device."""
    tensor = tensor.to(param.device)
    if not isinstance(param, DTensor):
        return tensor
    return distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)


def all_sum(values: torch.Tensor) -> torch.Tensor:
    """Add up `values` [S], of any shape S, over the ranks, on every rank. In place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_gather(values: torch.Tensor) -> torch.Tensor:
    """Gather the `values` [S] of all W ranks, which have one shape S: [W, S]."""
    if world_size() == 1:
        return values[None]
    gathered = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(gathered, values)
    return torch.stack(gathered)


def all_names(names: Iterable[str]) -> list[str]:
    """Sort the names that any of the ranks has."""
    found: list[list[str]] = [list(names)] * world_size()
    if world_size() > 1:
        dist.all_gather_object(found, found[0])
    return sorted({name for of_rank in found for name in of_rank})


def all_max(value: int, device: torch.device) -> int:
    """The largest of the ranks' values."""
    if world_size() == 1:
        return value
    box = torch.tensor(value, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box)
