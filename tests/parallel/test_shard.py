"""Two ranks with FSDP2 over gloo give what one process gives."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from agentrl.config.sections.actor import ActorConfig, CriticConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.reward import RewardModelConfig
from agentrl.runtime.ranks import join_tokens, shares
from agentrl.workers.fsdp import FSDPCritic
from agentrl.workers.plan import update_plan
from agentrl.workers.reward_model import RewardModelWorker
from tests.forked import ForkedPython
from tests.model.families import make_model
from tests.reward.tiny_reward_model import make_reward_model
from tests.vision.sharded import updated
from tests.vision.tiny import make_tiny_vision_policy
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp
from tests.workers.made import critic_worker

RANKS = 2


TWO_RANKS = Path(__file__).with_name("one_of_two_ranks.py")


def run_ranks(work: Path, script: Path = TWO_RANKS) -> None:
    """Start the ranks and wait for both; fails with what they wrote when one does."""
    on_loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [ForkedPython([script, rank, RANKS, work], environment=on_loopback) for rank in range(RANKS)]
    try:
        for rank in ranks:
            ended = rank.wait(150)
            assert ended.returncode == 0, ended.stderr
    finally:
        for rank in ranks:
            rank.process.kill()


def test_two_ranks_equal_one(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, vocab_size: int, tmp_path: Path
) -> None:
    """7 sequences, tiny micro-batches: the shares differ in size and in the number of micro-batches."""
    batch = make_batch(prompts=7, n=1)
    generator = torch.Generator().manual_seed(1)
    batch = batch.with_fields(values=torch.zeros(batch.num_tokens))
    batch = batch.with_fields(returns=torch.randn(batch.num_tokens, generator=generator))
    # Muon's updates do not depend on the size of a gradient, so this is strict about directions; the gradient norms
    # among the metrics are strict about sizes.
    optim = OptimConfig(name="muon", lr=1e-2, adamw_lr=1e-3, lr_scheduler_type="linear")
    model = ModelConfig(path=str(tiny_policy))
    actor = ActorConfig(ppo_mini_batch_size=4, ppo_max_token_len_per_gpu=40, optim=optim)
    critic = CriticConfig(ppo_max_token_len_per_gpu=40, optim=optim, cliprange_value=100.0)

    worker = make_worker(actor, log_prob_max_tokens=64)
    logprobs, seen = worker.compute_log_probs(batch)
    batch = batch.with_fields(old_logprobs=logprobs)
    torch.save({item.name: getattr(batch, item.name) for item in fields(batch)}, tmp_path / "batch.pt")
    # Five experts of two ranks, each token goes to one: some experts get none in a micro-batch.
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
    }
    make_model("qwen3-moe", **sizes).save_pretrained(tmp_path / "experts")
    experts = ModelConfig(path=str(tmp_path / "experts"))
    judging = RewardModelConfig(
        model={"path": str(make_reward_model(tmp_path / "reward"))}, forward_max_token_len_per_gpu=40
    )
    settings = {"model": model, "actor": actor, "critic": critic, "experts": experts, "reward_model": judging}
    written: dict[str, Any] = {name: one.model_dump() for name, one in settings.items()}
    # In step 3 one of the two mini-batches holds nothing, on either rank, and the other one sequence.
    (_, first), (_, second) = update_plan(batch.group, actor.ppo_mini_batch_size, 1, "1/3")
    written["left_out"] = [*first, *second[1:]]
    (tmp_path / "settings.json").write_text(json.dumps(written))
    make_tiny_vision_policy(tmp_path / "vision")
    run_ranks(tmp_path)

    values = critic_worker(model, critic, actor, device="cpu", total_steps=10, seed=1)
    metrics = [seen, *(worker.update(batch, step=step) for step in (1, 2))]
    metrics += [values.update(batch, step=step) for step in (1, 2)]
    parts = shares(batch.lengths.tolist(), RANKS)
    found = [load_file(tmp_path / f"logprobs-{rank}.safetensors") for rank in range(RANKS)]
    scores = RewardModelWorker(judging, dtype="float32", device="cpu").compute_scores(batch)[0]
    for name, expected in (("logprobs", logprobs), ("scores", scores)):
        joined = join_tokens([tensors[name] for tensors in found], parts, batch)
        assert torch.allclose(joined, expected, rtol=0, atol=1e-5), name
    assert isinstance(values.backend, FSDPCritic)
    for name, params in (("policy", fsdp(worker).params), ("critic", values.backend.params)):
        saved = {key: torch.empty_like(param.detach()) for key, param in params.items()}
        load(saved, storage_reader=HuggingFaceStorageReader(str(tmp_path / name)))
        for key, param in params.items():
            assert torch.allclose(saved[key], param, rtol=0, atol=1e-5), (name, key)
    for rank in range(RANKS):
        for one, two in zip(metrics, json.loads((tmp_path / f"metrics-{rank}.json").read_text()), strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-5)

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    continued = make_worker(actor)
    continued.load(tmp_path / "policy")  # a checkpoint of two ranks, in one process
    left_out = torch.isin(torch.arange(len(batch)), torch.tensor(written["left_out"]))
    after = continued.update(batch.with_fields(zero_advantage=left_out), step=3)
    assert after["perf/update_tokens"] == batch.lengths[second[0]]
    assert json.loads((tmp_path / "after-0.json").read_text()) == pytest.approx(after, rel=1e-4, abs=1e-5)

    mixture = make_worker(actor, experts)
    metrics = [mixture.update(batch, step=step) for step in (1, 2)]
    for rank in range(RANKS):
        for one, two in zip(metrics, json.loads((tmp_path / f"experts-{rank}.json").read_text()), strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
    of_ranks = load_file(tmp_path / "experts.safetensors")
    assert "model.layers.1.mlp.experts.4.down_proj.weight" in of_ranks
    assert of_ranks.keys() == dict(mixture.weights().shapes).keys()
    for key, tensor in fsdp(mixture).named_tensors():
        assert torch.allclose(of_ranks[key], tensor, rtol=0, atol=1e-5), key

    before, seeing = load_file(tmp_path / "vision" / "model.safetensors"), load_file(tmp_path / "vision.safetensors")
    assert any("visual" in name and not torch.equal(before[name], seeing[name]) for name in before)
    for key, tensor in updated(tmp_path / "vision").items():
        # AdamW's first step is the gradient's sign times 1e-3: rounding shows where a gradient is almost 0.
        assert torch.allclose(seeing[key], tensor, rtol=0, atol=1e-4), key
