"""One rank of test_shard.py: log-probs of its share, two updates, a checkpoint, an export. Run as a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoTokenizer

from agentrl.config.sections.actor import ActorConfig, CriticConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.reward import RewardModelConfig
from agentrl.parallel.collectives import all_names
from agentrl.runtime.ranks import shares
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.reward_model import RewardModelWorker
from tests.vision.sharded import updated
from tests.workers.conftest import fsdp
from tests.workers.made import critic_worker, policy_worker


def main(rank: int, ranks: int, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work / 'rendezvous'}", rank=rank, world_size=ranks)
    settings = json.loads((work / "settings.json").read_text())
    model, actor = ModelConfig(**settings["model"]), ActorConfig(**settings["actor"])
    batch = RaggedBatch(**torch.load(work / "batch.pt", weights_only=True))
    worker = policy_worker(model, actor, device="cpu", temperature=1.0, log_prob_max_tokens=64, total_steps=10, seed=1)
    part = batch.select(shares(batch.lengths.tolist(), ranks)[rank])
    logprobs, seen = worker.compute_log_probs(part)
    critic_config = CriticConfig(**settings["critic"])
    critic = critic_worker(model, critic_config, actor, device="cpu", total_steps=10, seed=1)
    metrics = [seen, *(worker.update(batch, step=step) for step in (1, 2))]
    metrics.append(critic.update(batch, step=1))
    metrics.append(critic.update(batch, step=2))
    judge = RewardModelWorker(RewardModelConfig(**settings["reward_model"]), dtype="float32", device="cpu")
    scores = judge.compute_scores(part)[0]
    save_file({"logprobs": logprobs, "scores": scores}, work / f"logprobs-{rank}.safetensors")
    (work / f"metrics-{rank}.json").write_text(json.dumps(metrics))
    worker.save(work / "policy")
    critic.save(work / "critic")
    worker.export(work / "export", AutoTokenizer.from_pretrained(model.path))
    dist.barrier()
    worker.load(work / "policy")  # what was gathered can be scattered again
    left_out = torch.isin(torch.arange(len(batch)), torch.tensor(settings["left_out"]))
    after = worker.update(batch.with_fields(zero_advantage=left_out), step=3)
    (work / f"after-{rank}.json").write_text(json.dumps(after))

    model = ModelConfig(**settings["experts"])
    experts = policy_worker(model, actor, device="cpu", temperature=1.0, log_prob_max_tokens=64, total_steps=10, seed=1)
    metrics = [experts.update(batch, step=step) for step in (1, 2)]
    (work / f"experts-{rank}.json").write_text(json.dumps(metrics))
    weights = dict(fsdp(experts).named_tensors())  # every rank reads; the first one writes
    if rank == 0:
        save_file(weights, work / "experts.safetensors")

    assert all_names(["b", "a"] if rank else ["c", "b"]) == ["a", "b", "c"], "names that one rank alone has"
    seeing = updated(work / "vision")
    if rank == 0:
        save_file(seeing, work / "vision.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
