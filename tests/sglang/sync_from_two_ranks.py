"""One rank of test_sync.py: a policy sharded over two ranks changes and is sent to a server by rank 0. A script."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.engines.servers.sync import DistributedSender, TensorSender
from agentrl.engines.sglang.checksums import Expectation
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.weights import Weights
from agentrl.system.http import http_client
from tests.workers.conftest import fsdp
from tests.workers.made import policy_worker


async def send(kind: str, weights: Weights, url: str, version: int) -> None:
    sender = (
        TensorSender(torch.float32, 100_000, checksums=Expectation)
        if kind == "tensor"
        else DistributedSender(torch.float32, 100_000, "gloo", checksums=Expectation)
    )
    async with http_client() as http:
        faults = await sender.send([SGLangClient(url, http)], weights, version)
        await sender.close()
    assert not faults, faults
    assert sender.compared == "sent"


def main(rank: int, work: Path, url: str, kind: str, version: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work / 'rendezvous'}", rank=rank, world_size=2)
    worker = policy_worker(
        ModelConfig(path=str(work / "model")),
        ActorConfig(),
        device="cpu",
        temperature=1.0,
        log_prob_max_tokens=64,
        total_steps=1,
        seed=1,
    )
    assert any(isinstance(param, DTensor) for param in fsdp(worker).params.values())
    with torch.no_grad():
        for param in fsdp(worker).params.values():
            param.mul_(1.25)
    weights = Weights(worker.weights().shapes, fsdp(worker).named_tensors)
    if rank == 0:
        asyncio.run(send(kind, weights, url, version))
    else:
        for _ in weights.read():
            pass
    gathered = {name: tensor.clone() for name, tensor in weights.read()}
    if rank == 0:
        save_file(gathered, work / "sent.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
