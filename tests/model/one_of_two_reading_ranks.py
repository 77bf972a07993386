"""One rank of test_sharded_load.py: reads checkpoints into sharded models and compares with whole ones. A script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from transformers import AutoModelForCausalLM

from agentrl.config.sections.parallel import Parallel
from agentrl.errors import ConfigError
from agentrl.model import sharded_load
from agentrl.model.heads import PolicyModel, ValueModel
from agentrl.model.packed import load_model, token_logprobs
from agentrl.model.sharded_load import open_model, read_weights
from agentrl.parallel.collectives import full
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.shard import shard


def main(rank: int, ranks: int, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work / 'rendezvous'}", rank=rank, world_size=ranks)
    whole: list[object] = []
    distribute = torch.distributed.tensor.distribute_tensor

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        whole.append(tensor)
        return distribute(tensor, *args, **options)

    sharded_load.distribute_tensor = counted  # type: ignore[assignment,attr-defined]
    found = {}
    for folder in sorted((work / "models").iterdir()):
        whole.clear()
        found[folder.name] = compare(folder) | {"read whole": len(whole)}
    found["critic"] = compare_critic(work / "models" / "llama, bfloat16")
    for broken in ("lost", "no file", "cut short", "pickle"):
        found[broken] = {"error": message(work / broken)}
    (work / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def compare(folder: Path) -> dict[str, Any]:
    """What a sharded model read from `folder` has that a whole one has not."""
    base = open_model(str(folder), dtype="float32", device="cpu")
    root = PolicyModel(base)
    shard(root, base, Mesh(Parallel(), "cpu"))
    read_weights(root, base)
    own = load_model(str(folder), dtype="float32")
    params = dict(own.named_parameters())
    names = [name for name, _ in base.named_parameters()]
    wrong = [name for name, param in base.named_parameters() if not torch.equal(full(param), params[name])]
    buffers = dict(own.named_buffers())
    wrong += [name for name, buffer in base.named_buffers() if not torch.equal(buffer, buffers[name])]
    ids, offsets = torch.arange(40) % 60, torch.tensor([0, 15, 40])
    with torch.no_grad():
        logprobs, *_ = root(ids, offsets, needed=torch.ones(40, dtype=torch.bool), temperature=1.0)
        expected, *_ = token_logprobs(own, ids, offsets)
    return {
        "wrong": wrong,
        "same names": names == list(params),
        "off by": (logprobs - expected).abs().max().item(),
        "training": base.training,
        "stop": base.generation_config.eos_token_id == own.generation_config.eos_token_id == 7,
    }


def compare_critic(folder: Path) -> dict[str, Any]:
    root = ValueModel(open_model(str(folder), dtype="float32", device="cpu"))
    shard(root, root.base, Mesh(Parallel(), "cpu"))
    read_weights(root, root.base)
    params = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model.named_parameters())
    wrong = [name for name, param in root.base.named_parameters() if not torch.equal(full(param), params[name])]
    return {"wrong": wrong, "head": full(root.value_head.weight).abs().sum().item()}


def message(folder: Path) -> str:
    base = open_model(str(folder), dtype="float32", device="cpu")
    root = PolicyModel(base)
    shard(root, base, Mesh(Parallel(), "cpu"))
    try:
        read_weights(root, base)
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
