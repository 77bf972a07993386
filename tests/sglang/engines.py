"""Engines over servers that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.system.http import http_client
from tests.engines.contract import MAX_MODEL_LEN


def engine_of(
    processes: Sequence[SGLangProcess], reference: PreTrainedModel, *, ours: bool = False, **options: Any
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
