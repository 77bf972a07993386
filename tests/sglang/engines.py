"""Engines over servers that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl.http import http_client
from agentrl.rollout.sglang.client import SGLangClient
from agentrl.rollout.sglang.engine import SGLangEngine
from agentrl.rollout.sglang.model import ModelFacts
from agentrl.rollout.sglang.process import ServerProcess
from agentrl.rollout.sglang.supervisor import Server
from agentrl.rollout.sglang.sync.tensor import TensorSender
from tests.rollout.contract import MAX_MODEL_LEN


def engine_of(
    processes: Sequence[ServerProcess], reference: PreTrainedModel, *, ours: bool = False, **options: Any
) -> SGLangEngine:
    """For weights of `reference`'s shapes. `ours`: it restarts and stops the servers."""
    http = http_client()
    shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    return SGLangEngine(
        [Server(SGLangClient(process.url, http), process if ours else None) for process in processes],
        http,
        ModelFacts(reference.config.vocab_size, shapes),
        TensorSender(torch.float32, 1 << 20),
        max_model_len=MAX_MODEL_LEN,
        deterministic=True,
        **options,
    )
