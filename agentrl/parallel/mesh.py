"""The ranks of a process group, arranged: data x sequence x tensor, tensor innermost (see `Parallel`)."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from agentrl.config.sections.parallel import Parallel
from agentrl.errors import ConfigError
from agentrl.parallel.collectives import all_sum, rank, world_size


class Mesh:
    """This rank's place among the others, and its process groups. Every rank must make it at the same time."""

    def __init__(self, parallel: Parallel, device: str | torch.device) -> None:
        """Raises ConfigError when the ranks cannot be arranged so."""
        ranks = world_size()
        for fault in parallel.faults(ranks, "*."):
            raise ConfigError(fault)
        self.parallel = parallel
        self.data = ranks // parallel.copies
        """Ranks, or blocks of them, that work on sequences of their own."""
        self.data_rank, in_block = divmod(rank(), parallel.copies)
        self.first = in_block == 0
        """True on the rank that speaks for its block, whose ranks all see the same tokens."""
        self.averaged = self.data * parallel.sequence
        """Ranks over which FSDP averages the gradients."""
        self.sequence: dist.ProcessGroup | None = None
        """The ranks that split each micro-batch's tokens with this one."""
        self.fsdp: DeviceMesh | None = None
        """Mesh over which parameters are sharded (last dimension) and replicated (first of two)."""
        self.tensor: DeviceMesh | None = None
        """Mesh over which matrices are split."""
        if ranks == 1:
            return
        shards = parallel.shards or self.averaged
        sizes = {"replica": self.averaged // shards, "shard": shards, "tensor": parallel.tensor}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        whole = init_device_mesh(torch.device(device).type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.fsdp = whole["replica", "shard"] if "replica" in sizes else whole["shard"]
        self.tensor = whole["tensor"] if "tensor" in sizes else None
        if parallel.sequence > 1:
            starts = itertools.product(range(0, ranks, parallel.copies), range(parallel.tensor))
            blocks = [list(range(block + place, block + parallel.copies, parallel.tensor)) for block, place in starts]
            self.sequence, _ = dist.new_subgroups_by_enumeration(blocks)
        for group in [*whole.get_all_groups(), *([self.sequence] if self.sequence is not None else [])]:
            _wait_as_long_as_all(group, torch.device(device))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up `values` [S], of any shape S, over the blocks, on every rank."""
        return all_sum(values if self.first else torch.zeros_like(values))


def _wait_as_long_as_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give `group` the time limit of the default one, and not torch's own: 10 minutes with NCCL."""
    world = dist.group.WORLD
    assert world is not None
    _set_pg_timeout(world._get_backend(device).options._timeout, group)
