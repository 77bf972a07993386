"""The contract of rollout engines, on a real vLLM server."""

from __future__ import annotations

import asyncio
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
from tests.engines.contract import MAX_MODEL_LEN, MAX_NUM_SEQS, PATIENT, EngineContract, params_of, prompt_of


class TestVLLMContract(EngineContract):
    long = 600  # 3 s and more, by the pace of `tests.vllm.paced`
    endless = 3600
    block = CPU_BLOCK
    first_of_stops = "in the text"

    async def until_running(self, engine: RolloutEngine, count: int = 1) -> None:
        """Until so many requests have tokens: a server that has just been asked has sampled nothing yet."""
        assert isinstance(engine, ServerEngine)
        while sum(bool(call.partial.ids) for call in engine._calls.values()) < count:
            await asyncio.sleep(0.01)

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
            timings=PATIENT,
        )
        yield engine
        await engine.close()

    async def test_a_server_without_a_free_place_answers_checks(
        self, engine: ServerEngine, server: VLLMProcess
    ) -> None:
        """By the tokens that it samples for others."""
        tasks = [
            asyncio.create_task(engine.generate(prompt_of(9 + i), params_of(self.endless), f"{i}"))
            for i in range(MAX_NUM_SEQS)
        ]
        await self.until_running(engine, MAX_NUM_SEQS)
        async with http_client() as http:
            client = VLLMClient(server.url, http, server.key)
            before = await client.sampled_tokens(None)
            await client.check(None)
            assert await client.sampled_tokens(None) > before
        await engine.abort()
        await asyncio.gather(*tasks)
