"""One rank of test_lora.py: log-probs with and without adapters, two updates, a checkpoint, an export. A script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoTokenizer

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.runtime.ranks import shares
from agentrl.trajectory.batch import RaggedBatch
from tests.workers.conftest import fsdp
from tests.workers.made import policy_worker


def main(rank: int, ranks: int, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work / 'rendezvous'}", rank=rank, world_size=ranks)
    settings = json.loads((work / "settings.json").read_text())
    model, actor = ModelConfig(**settings["model"]), ActorConfig(**settings["actor"])
    batch = RaggedBatch(**torch.load(work / "batch.pt", weights_only=True))
    worker = policy_worker(model, actor, device="cpu", temperature=1.0, log_prob_max_tokens=128, total_steps=10, seed=1)
    part = batch.select(shares(batch.lengths.tolist(), ranks)[rank])
    reference, _ = worker.compute_reference_log_probs(part)  # before anything with a gradient
    metrics = [worker.update(batch, step=step) for step in (1, 2)]
    after, _ = worker.compute_log_probs(part)
    again, _ = worker.compute_reference_log_probs(part)
    save_file({"reference": reference, "again": again, "after": after}, work / f"logprobs-{rank}.safetensors")
    (work / f"metrics-{rank}.json").write_text(json.dumps(metrics))
    merged = {name: tensor.clone() for name, tensor in fsdp(worker).named_tensors()}
    if rank == 0:
        save_file(merged, work / "merged.safetensors")
    worker.save(work / "policy")
    worker.export(work / "export", AutoTokenizer.from_pretrained(model.path))
    dist.barrier()
    worker.load(work / "policy")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
