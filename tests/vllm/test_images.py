"""Images that a vLLM server is sent: its log-probs are those of the trainer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.chat import Chat
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync import TensorSender
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.engines.weights import Weights
from agentrl.model.packed import load_model, token_logprobs
from agentrl.system.http import http_client
from agentrl.trajectory import Message
from agentrl.trajectory.collate import from_trajectories
from tests.vision.test_rollouts import SMALL, TALL, question, run, sample
from tests.vision.tiny import make_tiny_vision_policy, picture
from tests.vllm.conftest import running

DEFINED = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules["torchvision_operators"] = self

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def vision_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose heads vLLM's attention on a CPU takes."""
    return make_tiny_vision_policy(tmp_path_factory.mktemp("vision-policy"), head_dim=32)


@pytest.fixture(scope="module")
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torchvision, which vLLM's models with images import, and what makes it importable on a CPU.

    Its wheel is made for CUDA's torch: the operators that it registers shapes for have to be defined first.
    """
    folder = tmp_path_factory.mktemp("torchvision")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "torchvision==0.28.0"], check=True)
    (folder / "sitecustomize.py").write_text(DEFINED, encoding="utf-8")
    return folder


@pytest.fixture
def serving(
    vision_policy: Path, torchvision: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VLLMProcess]:
    monkeypatch.setenv("PYTHONPATH", str(torchvision))
    arguments = VLLMArguments(str(vision_policy), "cpu", "float32", context_length=400, max_num_seqs=8)
    with running(arguments, tmp_path) as process:
        yield process


async def test_server_and_trainer_agree_on_every_sampled_token(serving: VLLMProcess, vision_policy: Path) -> None:
    """The second row differs from the first in nothing but the pixels; the last one has no image in its prompt."""
    text: list[Message] = [{"role": "user", "content": "Just text."}]
    rows = [question(SMALL), question(picture(9)), question(SMALL, TALL), text]
    chat, http, model = Chat.from_pretrained(str(vision_policy)), http_client(), load_model(str(vision_policy))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.1)
    named = dict(model.named_parameters())
    engine = VLLMEngine(
        [Server(VLLMClient(serving.url, http, serving.key))],
        http,
        ModelFacts(model.config.get_text_config().vocab_size, {name: tuple(one.shape) for name, one in named.items()}),
        TensorSender(torch.float32, 1 << 20),
        max_model_len=400,
        deterministic=True,
    )
    try:
        await engine.update_weights(Weights.from_tensors(named.items()), 1)
        trajectories = await run(engine, chat, [sample(index, prompt) for index, prompt in enumerate(rows)], n=2)
    finally:
        await engine.close()
    batch = from_trajectories(trajectories, turn_reward_coef=1.0)
    with torch.no_grad():
        logprobs, *_ = token_logprobs(model, batch.ids, batch.offsets, images=batch.images)
        blind, *_ = token_logprobs(model, batch.ids, batch.offsets)
    assert (logprobs - batch.rollout_logprobs)[batch.mask].abs().max() < 1e-4
    assert (blind - logprobs)[batch.mask].abs().max() > 0.05
