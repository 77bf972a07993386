"""The contract of rollout engines, on a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from transformers import PreTrainedModel

from agentrl.engines.contract import RolloutEngine, SamplingParams
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.process import SGLangProcess
from tests.engines.contract import MAX_NUM_SEQS, EngineContract, prompt_of
from tests.sglang.engines import engine_of


class TestSGLangContract(EngineContract):
    long = 900  # 2 s: in 0.5 s a server beside other work can have ended what the test was about to interrupt

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

    async def test_of_those_that_wait_the_smallest_number_goes_first(self, engine: SGLangEngine) -> None:
        """With all places but one taken for long; a request with a larger number that runs is not stopped."""
        ended: list[str] = []

        async def ask(name: str, tokens: int, priority: int) -> None:
            await engine.generate(prompt_of(20), SamplingParams(tokens, temperature=0.0, priority=priority), name)
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            for number in range(MAX_NUM_SEQS):
                group.create_task(ask(f"runs {number}", 60 if number else 20, 99))
            await self.until_running(engine, MAX_NUM_SEQS)
            for name, priority in (("c", 3), ("b", 2), ("a", 1)):
                group.create_task(ask(name, 3, priority))
        assert ended[:4] == ["runs 0", "a", "b", "c"]
