"""The contract of rollout engines, on a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from transformers import PreTrainedModel

from agentrl.engines.contract import RolloutEngine
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.process import SGLangProcess
from tests.engines.contract import EngineContract
from tests.sglang.engines import engine_of


class TestSGLangContract(EngineContract):
    async def until_running(self, engine: RolloutEngine, count: int = 1) -> None:
        """Until so many requests have tokens: a server that has just been asked has sampled nothing yet."""
        assert isinstance(engine, SGLangEngine)
        while sum(bool(call.partial.ids) for call in engine._calls.values()) < count:
            await asyncio.sleep(0.002)

    @pytest.fixture
    async def engine(self, server: SGLangProcess, reference: PreTrainedModel) -> AsyncIterator[SGLangEngine]:
        engine = engine_of([server], reference)
        yield engine
        await engine.close()
