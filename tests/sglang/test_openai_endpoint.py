"""The official OpenAI client through the endpoint to a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.chat import Chat
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.engines.weights import Weights
from tests.engines.contract import MAX_MODEL_LEN, logprobs_of
from tests.openai_api.conftest import ADD, Service, serve
from tests.sglang.engines import engine_of

QUESTION = {"role": "user", "content": "What is 2 + 3?"}
SHORT: dict[str, Any] = {"max_tokens": 8, "tools": [ADD]}


@pytest.fixture(scope="module")
def chat(model_dir: Path) -> Chat:
    return Chat.from_pretrained(str(model_dir))


@pytest.fixture
async def service(server: SGLangProcess, reference: PreTrainedModel, chat: Chat) -> AsyncIterator[Service]:
    engine = engine_of([server], reference)
    await engine.update_weights(Weights.from_tensors(reference.named_parameters()), 1)
    async with serve(chat, engine, max_model_len=MAX_MODEL_LEN, max_response_tokens=MAX_MODEL_LEN) as made:
        yield made
    await engine.close()


async def test_a_tool_conversation_is_recorded_as_the_server_sampled_it(
    service: Service, chat: Chat, reference: PreTrainedModel
) -> None:
    async with service.session() as open:
        talk: list[Any] = [QUESTION]
        seen = 0
        for _ in range(3):
            reply = await open.say(talk, logprobs=True, extra_body={"return_token_ids": True}, **SHORT)
            (transcript,) = open.trajectory.transcripts
            ids = reply.choices[0].token_ids
            assert transcript.ids == reply.prompt_token_ids + ids
            given = torch.tensor([one.logprob for one in reply.choices[0].logprobs.content])
            expected = logprobs_of(reference, reply.prompt_token_ids, ids, 1.0)
            assert torch.allclose(given, expected, atol=1e-4, rtol=0)
            assert reply.usage.prompt_tokens_details.cached_tokens >= 0.9 * (seen - 1), "the last turn's are all found"
            seen = reply.usage.total_tokens
            message = reply.choices[0].message
            talk.append(message)
            for call in message.tool_calls or ():
                talk.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
            if not message.tool_calls:
                talk.append({"role": "user", "content": "go"})
        assert {span.version for span in transcript.versions} == {1}


async def test_streams_branches_and_many_sessions(service: Service) -> None:
    async def agent(stream: bool) -> int:
        async with service.session() as open:
            answer = await open.say([QUESTION], stream=stream, stop=["#"], **SHORT)
            if stream:
                text = "".join([c.choices[0].delta.content or "" async for c in answer if c.choices])
            else:
                text = answer.choices[0].message.content or ""
            assert "#" not in text
            await asyncio.gather(*[open.say([QUESTION], **SHORT) for _ in range(2)])
            return len(open.trajectory.transcripts)

    assert await asyncio.gather(*[agent(k % 2 == 0) for k in range(12)]) == [3] * 12


async def test_a_client_that_goes_away_frees_the_server(service: Service) -> None:
    async with service.session() as open:
        task = asyncio.create_task(open.say([QUESTION]))
        while not (await service.engine.health()).running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        while (await service.engine.health()).running:
            await asyncio.sleep(0.01)
        assert open.trajectory.num_sampled == 0
        assert (await open.say([QUESTION], **SHORT)).usage.completion_tokens <= 8
