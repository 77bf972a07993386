"""Ranks of test_sharded_state.py: one state goes to other numbers of ranks and back, unchanged. Run as a script.

Every process is forked from one that has imported everything already.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from agentrl.checkpoint.state import WorkerState, checksums
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import CheckpointError
from agentrl.optim.optimizer import Optim
from agentrl.parallel.collectives import full, placed_like

Sharding = Callable[[nn.Module], object]


class Net(nn.Module):
    """Odd sizes: over 4 ranks some hold less than others of a tensor, or nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)  # divisible by 2: tensor parallel
        self.odd, self.norm = nn.Linear(3, 5, bias=False), nn.LayerNorm(1)


class Part:
    """The net and its optimizer on this rank."""

    def __init__(self, seed: int, sharding: Sharding | None, muon: bool = True) -> None:
        net = Net(seed)
        if sharding is not None:
            sharding(net)
        self.params = dict(net.named_parameters())
        config = OptimConfig(name="muon" if muon else "adamw")
        self.optim = Optim(self.params, {"up.weight", "odd.weight"}, config, 10)
        self.state = WorkerState(self.params, self.optim)

    def learn(self) -> None:
        for step in (1, 2):
            generator = torch.Generator().manual_seed(step)
            for param in self.params.values():
                param.grad = placed_like(torch.randn(param.shape, generator=generator), param)
            self.optim.step(step)

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: full(t.detach()).clone() for name, t in {**self.params, **self.optim.state()}.items()}


def fsdp(net: nn.Module) -> object:
    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def replicas(net: nn.Module) -> object:
    return fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))


def tensor_parallel(net: nn.Module) -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["data"])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main(rank: int, work: Path) -> None:
    @contextmanager
    def group(name: str, size: int) -> Iterator[bool]:
        """Whether this process is in it."""
        if rank < size:
            dist.init_process_group("gloo", init_method=f"file://{work / name}.met", rank=rank, world_size=size)
        yield rank < size
        if rank < size:
            dist.destroy_process_group()

    with group("begin", 2) as takes_part:
        if takes_part:
            for name, muon in (("two", True), ("adamw", False)):
                part = Part(0, fsdp, muon)
                part.learn()
                part.state.save(work / name, background=True)
                before = part.whole()
                part.learn()  # what is written is what it was
                part.state.finish()
                if rank == 0:
                    save_file(before, work / f"{name}.reference")
            dist.barrier()
    if rank == 0:  # to one process, and from it
        part = Part(1, None)
        part.state.load(work / "two")
        part.state.save(work / "one")
    with group("four", 4):
        reference = load_file(work / "two.reference")
        dist.barrier()
        for begin, name, sharding in (
            ("two", "four", fsdp),
            ("one", "replicas", replicas),
            ("replicas", "tensor", tensor_parallel),
        ):
            part = Part(1, sharding)
            assert not torch.equal(full(part.params["up.weight"].detach()), reference["up.weight"])
            part.state.load(work / begin)
            assert same(part.whole(), reference), name
            assert checksums({**part.params, **part.optim.state()}) == checksums(reference), name
            part.state.save(work / name)
            dist.barrier()
        part = Part(1, fsdp, muon=False)
        part.state.load(work / "adamw")
        assert same(part.whole(), load_file(work / "adamw.reference"))
        told_to_all(part, rank, work)
    with group("end", 2) as takes_part:
        for name in ("four", "replicas", "tensor") if takes_part else ():
            part = Part(2, fsdp)
            part.state.load(work / name)
            assert same(part.whole(), reference), name


def told_to_all(part: Part, rank: int, work: Path) -> None:
    """What one rank alone cannot read (a disk of its own, a file that it alone needs), no rank takes over."""
    before = part.whole()
    try:
        part.state.load(work / ("nowhere" if rank == 3 else "adamw"))
    except CheckpointError as error:
        assert ("another rank" in str(error)) == (rank != 3), error
    else:
        raise AssertionError("the load of all must fail with that of rank 3")
    assert same(part.whole(), before)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            try:
                main(number, Path(sys.argv[1]))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    failed = 0
    for child in children:
        failed |= os.waitpid(child, 0)[1]
    sys.exit(failed != 0)
