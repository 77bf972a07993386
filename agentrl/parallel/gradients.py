"""Add up, measure and clip the gradients of one optimizer step, however parameters are sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from agentrl.parallel.collectives import full, local


def by_mesh(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group `params` by the mesh that they are sharded over, as torch's fused operations need."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for param in params:
        groups[param.device_mesh if isinstance(param, DTensor) else None].append(param)
    return list(groups.values())


def add_up(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of `params` over the ranks of `group`, which hold the same parts of them. In place."""
    parts = [local(param.grad) for param in params if param.grad is not None]
    if not parts:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(total.view_as(part))


def total_norm(params: Iterable[nn.Parameter]) -> torch.Tensor:
    """Compute the norm of all gradients together: a scalar, the same on every rank."""
    groups = by_mesh(param for param in params if param.grad is not None)
    norms = [full(get_total_norm([param.grad for param in group if param.grad is not None])) for group in groups]
    return torch.stack(norms).norm()


def clip(params: Iterable[nn.Parameter], limit: float, norm: torch.Tensor) -> None:
    """Scale all gradients so that their norm, the scalar `norm`, is at most `limit`. In place."""
    for group in by_mesh(params):
        clip_grads_with_norm_(group, limit, norm)
