"""The contract of rollout engines, on a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.http import http_client
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.sglang.client import SGLangClient
from agentrl.rollout.sglang.engine import SGLangEngine
from agentrl.rollout.sglang.model import ModelFacts
from agentrl.rollout.sglang.process import ServerProcess
from agentrl.rollout.sglang.supervisor import Server
from agentrl.rollout.sglang.sync.tensor import TensorSender
from tests.rollout.contract import MAX_MODEL_LEN, EngineContract


class TestSGLangContract(EngineContract):
    async def until_running(self, engine: RolloutEngine, count: int = 1) -> None:
        """Until so many requests have tokens: a server that has just been asked has sampled nothing yet."""
        assert isinstance(engine, SGLangEngine)
        while sum(bool(call.part.ids) for call in engine._calls.values()) < count:
            await asyncio.sleep(0.002)

    @pytest.fixture
    async def engine(self, server: ServerProcess, reference: PreTrainedModel) -> AsyncIterator[SGLangEngine]:
        http = http_client()
        shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
        engine = SGLangEngine(
            [Server(SGLangClient(server.url, http))],
            http,
            ModelFacts(reference.config.vocab_size, shapes),
            TensorSender(torch.float32, 1 << 20),
            max_model_len=MAX_MODEL_LEN,
            deterministic=True,
        )
        yield engine
        await engine.close()
