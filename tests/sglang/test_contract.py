"""The contract of rollout engines, on a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from transformers import PreTrainedModel

from agentrl.engines.contract import RolloutEngine, SamplingParams
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.system.http import http_client
from tests.engines.contract import MAX_NUM_SEQS, PATIENT, EngineContract, prompt_of
from tests.sglang.engines import engine_of


class TestSGLangContract(EngineContract):
    # A server goes on while this process stands still, which has taken 2 s beside other work.
    long = 1800  # 4 s
    endless = 3600  # 8 s

    async def until_running(self, engine: RolloutEngine, count: int = 1) -> None:
        """Until so many requests have tokens: a server that has just been asked has sampled nothing yet."""
        assert isinstance(engine, SGLangEngine)
        while sum(bool(call.partial.ids) for call in engine._calls.values()) < count:
            await asyncio.sleep(0.01)

    @pytest.fixture
    async def engine(self, server: SGLangProcess, reference: PreTrainedModel) -> AsyncIterator[SGLangEngine]:
        engine = engine_of([server], reference, timings=PATIENT)
        yield engine
        await engine.close()

    async def test_of_those_that_wait_the_smallest_number_goes_first(
        self, engine: SGLangEngine, server: SGLangProcess
    ) -> None:
        """Once one of those that have every place is taken back; requests with a larger number run on."""
        for _ in range(5):  # the running requests last 8 s: where this process stood still for so long, once more
            ended: list[str] = []

            async def ask(name: str, tokens: int, priority: int, ended: list[str] = ended) -> None:
                await engine.generate(prompt_of(20), SamplingParams(tokens, temperature=0.0, priority=priority), name)
                ended.append(name)

            running = [asyncio.create_task(ask(f"runs {number}", self.endless, 99)) for number in range(MAX_NUM_SEQS)]
            await self.until_running(engine, MAX_NUM_SEQS)
            waiting = [asyncio.create_task(ask(name, 3, number)) for name, number in (("c", 3), ("b", 2), ("a", 1))]
            while await requests_that_wait(server.url) < len(waiting) and not ended:
                await asyncio.sleep(0.01)
            running[0].cancel()
            await asyncio.gather(*waiting)
            ended_while_others_ran = list(ended)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if len(ended_while_others_ran) == len(waiting):
                break
        assert ended_while_others_ran == ["a", "b", "c"]


async def requests_that_wait(url: str) -> int:
    """Requests in a server's queue."""
    async with http_client() as http, http.get(f"{url}/v1/loads", params={"include": "core"}) as answer:
        return sum(load["num_waiting_reqs"] for load in (await answer.json())["loads"])
