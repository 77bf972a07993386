"""An update of the vision policy in which only some ranks have images: the same on one rank and on several."""

from __future__ import annotations

from pathlib import Path

import torch

from agentrl.chat import Chat
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.trajectory import Message
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.images import Images
from agentrl.trajectory.picture import image_part
from tests.trained import trained_batch
from tests.vision.tiny import picture
from tests.workers.conftest import fsdp
from tests.workers.made import policy_worker


def updated(policy: Path) -> dict[str, torch.Tensor]:
    """All weights after one update; every rank must ask. Of two ranks each gets one of the two sequences."""
    batch = images_for_one(Chat.from_pretrained(str(policy)))
    actor = ActorConfig(ppo_mini_batch_size=2, optim=OptimConfig(lr=1e-3))
    model = ModelConfig(path=str(policy))
    worker = policy_worker(model, actor, device="cpu", temperature=1.0, log_prob_max_tokens=64, total_steps=1, seed=1)
    worker.update(batch, step=1)
    return {name: tensor.clone() for name, tensor in fsdp(worker).named_tensors()}


def images_for_one(chat: Chat) -> RaggedBatch:
    prompts: list[list[Message]] = [
        [{"role": "user", "content": [image_part(picture(1)), {"type": "text", "text": "What?"}]}],
        [{"role": "user", "content": "What is it that you see?"}],
    ]
    ids = [chat.render(prompt) for prompt in prompts]
    images = Images.from_sequences([chat.images(one, prompt) for one, prompt in zip(ids, prompts, strict=True)])
    answer = chat.encode("It is a dot.")
    mask = torch.tensor([flag for one in ids for flag in [False] * len(one) + [True] * len(answer)])
    flat = [id for one in ids for id in [*one, *answer]]
    offsets = torch.tensor([0, *(len(one) + len(answer) for one in ids)]).cumsum(0)
    return trained_batch(
        offsets, torch.tensor(flat), mask, torch.tensor([0, 1]), advantages=mask.float(), images=images
    )
