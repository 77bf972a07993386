"""The contract of rollout engines, on a real vLLM server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.engines.contract import RolloutEngine
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import CPU_BLOCK
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.system.http import http_client
from tests.engines.contract import MAX_MODEL_LEN, EngineContract
from tests.waiting import until


class TestVLLMContract(EngineContract):
    long = 1800
    endless = 3600
    block = CPU_BLOCK
    first_of_stops = "in the text"

    async def until_running(self, engine: RolloutEngine, count: int = 1) -> None:
        """Until so many requests have tokens: a server that has just been asked has sampled nothing yet."""
        assert isinstance(engine, ServerEngine)
        await until(lambda: sum(bool(call.partial.ids) for call in engine._calls.values()) >= count, 60)

    @pytest.fixture
    async def engine(self, server: VLLMProcess, reference: PreTrainedModel) -> AsyncIterator[ServerEngine]:
        http = http_client()
        shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
        client = VLLMClient(server.url, http, server.key)
        await client.info()
        engine = VLLMEngine(
            [Server(client)],
            http,
            ModelFacts(reference.config.vocab_size, shapes),
            TensorSender(torch.float32, 1 << 20),
            max_model_len=MAX_MODEL_LEN,
            deterministic=True,
        )
        yield engine
        await engine.close()
