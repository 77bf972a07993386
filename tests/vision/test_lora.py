"""Adapters of a vision-language model: in its vision tower, too, unless that is frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.chat import Chat
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import ConfigError
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.workers import PolicyWorker
from tests.naming import naming
from tests.vision.sharded import images_for_one
from tests.workers.conftest import fsdp
from tests.workers.made import policy_worker


def worker_of(path: Path, *, freeze: bool, rank: int = 4) -> PolicyWorker:
    actor = ActorConfig(ppo_mini_batch_size=2, freeze_vision_tower=freeze, optim=OptimConfig(lr=1e-2))
    model = ModelConfig(path=str(path), lora_rank=rank)
    return policy_worker(model, actor, device="cpu", temperature=1.0, log_prob_max_tokens=64, total_steps=2, seed=1)


@pytest.mark.parametrize("freeze", [False, True])
def test_adapters_learn_and_are_merged(vision_policy: Path, chat: Chat, freeze: bool) -> None:
    worker = worker_of(vision_policy, freeze=freeze)
    assert all("lora" in name for name in fsdp(worker).params)
    assert any("visual" in name for name in fsdp(worker).params) != freeze
    batch = images_for_one(chat)
    before = {name: tensor.clone() for name, tensor in fsdp(worker).named_tensors()}
    for step in (1, 2):
        worker.update(batch, step=step)
    changed = {name for name, tensor in fsdp(worker).named_tensors() if not torch.equal(before[name], tensor)}
    assert any("q_proj" in name for name in changed)
    assert any("visual" in name for name in changed) != freeze


def test_a_model_without_a_vision_tower_has_none_to_freeze(tmp_path: Path) -> None:
    with naming(ConfigError, "freeze_vision_tower=true", "Qwen3ForCausalLM", "no effect"):
        worker_of(make_tiny_policy(tmp_path, seed=0), freeze=True, rank=0)
