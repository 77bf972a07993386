"""The HTTP side: streams, wrong input, callers that go away, and many at once, with a real model behind it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentrl.chat import Chat
from agentrl.engines.contract import Generation
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.openai_api import endpoint as endpoint_module
from agentrl.trajectory import Status
from tests import framing
from tests.openai_api.conftest import ADD, Open, embedded, scripted
from tests.openai_api.programs import QUESTION
from tests.openai_api.test_record import SCRIPT
from tests.waiting import until

SHORT: dict[str, Any] = {"max_tokens": 12}


async def streamed(open: Open, messages: list[Any], **more: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that a client puts together from a stream, and the chunks."""
    chunks = [chunk async for chunk in await open.say(messages, stream=True, **more)]
    message: dict[str, Any] = {"content": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    message["calls"].append([call.id, call.function.name, ""])
                message["calls"][call.index][2] += call.function.arguments or ""
    return message, chunks


async def test_a_stream_says_what_a_single_answer_says(chat: Chat) -> None:
    long = "word " * 60 + SCRIPT[1]
    async with scripted(chat, [long, long, "#### 5"]) as (service, _):
        async with service.session() as open:
            whole = await open.say([QUESTION], tools=[ADD], logprobs=True)
        async with service.session() as open:
            options: dict[str, Any] = {"logprobs": True, "stream_options": {"include_usage": True}}
            message, chunks = await streamed(open, [QUESTION], tools=[ADD], **options)
            answers = [{"role": "tool", "tool_call_id": id, "content": "2"} for id, _, _ in message["calls"]]
            calls = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in message["calls"]
            ]
            back = {"role": "assistant", "content": message["content"], "tool_calls": calls}
            await open.say([QUESTION, back, *answers], tools=[ADD])
            assert len(open.trajectory.transcripts) == 1, "what was streamed is what was recorded"
        expected = whole.choices[0]
        assert message["content"] == expected.message.content
        assert message["finish_reason"] == expected.finish_reason == "tool_calls"
        assert message["calls"] == [[c.id, c.function.name, c.function.arguments] for c in expected.message.tool_calls]
        assert len(chunks) > 8
        assert chunks[0].choices[0].logprobs.model_dump() == expected.logprobs.model_dump()
        assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
        assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_log_probs_ids_and_usage_are_the_engines(chat: Chat, tiny_dir: Path) -> None:
    async with embedded(chat, tiny_dir) as service, service.session() as open:
        options: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}, **SHORT}
        first = await open.say([QUESTION], **options)
        (transcript,) = open.trajectory.transcripts
        choice = first.choices[0]
        assert first.prompt_token_ids == chat.render([QUESTION])
        assert first.prompt_token_ids + choice.token_ids == transcript.ids
        assert [one.logprob for one in choice.logprobs.content] == transcript.logprobs[transcript.prompt_length :]
        assert all(logprob < 0 for logprob in transcript.logprobs[transcript.prompt_length :])
        again = await open.say([QUESTION, choice.message, {"role": "user", "content": "And?"}], **options)
        assert len(open.trajectory.transcripts) == 1
        assert (
            again.prompt_token_ids[: len(first.prompt_token_ids) + 12]
            == transcript.ids[: len(chat.render([QUESTION])) + 12]
        )
        usage = again.usage
        assert usage.prompt_tokens == len(again.prompt_token_ids)
        assert usage.prompt_tokens_details.cached_tokens >= 0.8 * (first.usage.total_tokens - 1)
        _, chunks = await streamed(open, [{"role": "user", "content": "x"}], **options)
        assert chunks[0].choices[0].token_ids == open.trajectory.transcripts[1].ids[-12:]


async def test_random_text_of_a_real_policy_is_recognised_when_it_comes_back(chat: Chat, tiny_dir: Path) -> None:
    """An untrained policy writes broken characters and control tokens; a client's round trip must not fork it."""
    async with embedded(chat, tiny_dir, max_response_tokens=900) as service:
        for _ in range(4):
            async with service.session() as open:
                talk: list[Any] = [QUESTION]
                tokens = 0
                for _ in range(5):
                    reply = await open.say(talk, tools=[ADD], max_tokens=40)
                    tokens += reply.usage.completion_tokens
                    talk += [reply.choices[0].message, {"role": "user", "content": "more"}]
                assert len(open.trajectory.transcripts) == 1
                assert open.trajectory.num_sampled == tokens > 100


async def test_half_a_surrogate_pair_comes_back_as_it_was_sent(chat: Chat) -> None:
    odd = '<tool_call>\n{"name": "a\\ud800", "arguments": {"x": "\\ud800 é"}}\n</tool_call>'
    async with scripted(chat, [odd, "ok"]) as (service, _), service.session() as open:
        reply = (await open.say([QUESTION], tools=[ADD])).choices[0].message
        assert json.loads(reply.tool_calls[0].function.arguments) == {"x": "\ud800 é"}
        answer = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "unknown"}
        await open.say([QUESTION, reply, answer], tools=[ADD])
        assert len(open.trajectory.transcripts) == 1


async def test_a_wrong_request_names_its_field(chat: Chat) -> None:
    """In test_request is which are wrong."""
    async with scripted(chat, ["ok"]) as (service, engine), service.session() as open, httpx.AsyncClient() as raw:
        for body, param in (({}, "messages"), ({"messages": [QUESTION], "tools": [{}]}, "tools[0].type")):
            answer = await raw.post(f"{open.base_url}/chat/completions", json={"model": "m", **body})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert param.split(".")[0] in error["message"]
        assert engine.prompts == {} and open.trajectory.transcripts == []


async def test_no_framing_of_a_body_passes_the_limit(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_BODY", 5000)
    async with scripted(chat, SCRIPT) as (service, _), service.session() as open:
        target = open.base_url.removeprefix(service.endpoint.url).encode() + b"/chat/completions"
        await asyncio.to_thread(framing.check, int(service.endpoint.url.rpartition(":")[2]), 5000, target)
        assert (await open.say([QUESTION])).choices  # it is served on


async def test_what_is_not_json_not_a_route_or_too_large(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_BODY", 5000)
    async with scripted(chat, ["ok"]) as (service, _), service.session() as open, httpx.AsyncClient() as raw:
        url = f"{open.base_url}/chat/completions"
        for content, status in ((b"{", 400), (b"[]", 400), (b"", 400), (b"\xff\xfe", 400), (b"x" * 6000, 413)):
            answer = await raw.post(url, content=content)
            assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})
            assert answer.headers["x-should-retry"] == "false"
        wrong = (("GET", "/chat/completions", 405), ("POST", "/embeddings", 404), ("PUT", "/", 404))
        for method, path, status in wrong:
            answer = await raw.request(method, open.base_url + path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, None)
            assert "answers POST v1/chat/completions, POST v1/responses, POST v1/messages, " in answer.text
            assert open.base_url.split("/")[3] not in answer.text
        assert [model.id async for model in open.client.models.list()] == ["policy"]
        assert (await open.client.models.retrieve("any")).id == "any"
        anthropic = (await raw.get(f"{open.base_url}/v1/models")).json()
        assert anthropic["data"][0]["type"] == "model" and anthropic["has_more"] is False


async def test_what_the_run_decides_is_ignored_and_counted(chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted(chat, ["a", "b"]) as (service, _), service.session() as open:
        await open.say([QUESTION], temperature=0.0, user="me", store=True, n=1, parallel_tool_calls=True)
        await open.say([QUESTION], temperature=0.3, top_p=0.5, response_format={"type": "text"})
        assert open.trajectory.metrics["openai_dropped_temperature"] == 2
        assert open.trajectory.metrics["openai_dropped_top_p"] == 1
    assert sum("temperature" in record.message for record in caplog.records) == 1


async def test_unknown_and_ended_sessions(chat: Chat) -> None:
    async with scripted(chat, ["ok"]) as (service, _):
        async with service.session() as open:
            url = open.base_url
        for base in (url, f"{service.endpoint.url}/guess/v1", f"{service.endpoint.url}//v1"):
            with pytest.raises(openai.NotFoundError):
                async with openai.AsyncOpenAI(base_url=base, api_key="k") as client:
                    await client.chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]


async def test_only_loopback_is_listened_on(chat: Chat) -> None:
    async with scripted(chat, []) as (service, _):
        assert service.endpoint._server is not None
        (server,) = service.endpoint._server.servers
        assert [socket.getsockname()[0] for socket in server.sockets] == ["127.0.0.1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_goes_away_cancels_its_generation_and_may_come_again(
    chat: Chat, tiny_dir: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with embedded(chat, tiny_dir, max_response_tokens=1400) as service, service.session() as open:
        engine, ending, steps = service.engine, list[int](), list[None]()
        assert isinstance(engine, EmbeddedEngine)
        generate, step = engine.generate, engine._step

        async def watched(*args: Any, **kwargs: Any) -> Generation:
            try:
                return await generate(*args, **kwargs)
            finally:
                ending.append(len(steps))

        def counted() -> bool:
            steps.append(None)
            return step()

        monkeypatch.setattr(engine, "generate", watched)
        monkeypatch.setattr(engine, "_step", counted)

        async def call() -> None:
            answer = await open.say([QUESTION], stream=stream)
            if stream:
                async for _ in answer:
                    pass

        task = asyncio.create_task(call())
        while not (await service.engine.health()).running:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait({task})
        while (await service.engine.health()).running:
            await asyncio.sleep(0.001)
        await until(lambda: not open.session._tasks)
        assert len(ending) == 1 and len(steps) - ending[0] <= 2
        kept = open.trajectory.num_sampled  # A stream may have delivered some.
        assert kept <= len(steps) * stream
        await open.say([QUESTION], **SHORT)
        again = 1 + (kept > 0)
        assert (len(open.trajectory.transcripts), open.session.turns) == (again, again)
        assert open.trajectory.num_sampled == kept + 12


async def test_a_caller_that_goes_away_in_its_body_leaves_no_traceback(
    chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted(chat, SCRIPT) as (service, _), service.session() as open:
        path, port = open.base_url.split("/", 3)[3], int(service.endpoint.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode() + b"{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text
        await open.say([QUESTION])


async def test_closing_a_session_ends_its_calls(chat: Chat) -> None:
    async with scripted(chat, lambda session, turn: "x") as (service, engine):
        engine.delay = 60
        async with service.session() as open:
            url = f"{open.base_url}/chat/completions"
            async with httpx.AsyncClient() as raw:
                calls = [asyncio.create_task(raw.post(url, json={"messages": [QUESTION]})) for _ in range(3)]
                while engine.running < 3:
                    await asyncio.sleep(0.01)
                await open.session.close()
                assert [answer.status_code for answer in await asyncio.gather(*calls)] == [404] * 3
        assert engine.running == 0


async def test_a_slow_stream_is_kept_alive(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "KEEP_ALIVE_SECONDS", 0.02)
    async with scripted(chat, ["slow"]) as (service, engine), service.session() as open, httpx.AsyncClient() as raw:
        engine.delay = 0.2
        answer = await raw.post(f"{open.base_url}/chat/completions", json={"messages": [QUESTION], "stream": True})
        lines = [line for line in answer.text.split("\n\n") if line]
        assert sum(line.startswith(":") for line in lines) > 4
        events = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(e)["choices"][0]["delta"].get("content") or "" for e in events[:-1]) == "slow"


@pytest.mark.slice(0, "soak")
@pytest.mark.timeout(120)
async def test_two_hundred_sessions_at_once(chat: Chat, tiny_dir: Path) -> None:
    async with embedded(chat, tiny_dir) as service:

        async def agent() -> tuple[int, int, int]:
            async with service.session() as open:
                talk: list[Any] = [QUESTION]
                tokens = 0
                for _ in range(3):
                    reply = await open.say(talk, **SHORT)
                    tokens += reply.usage.completion_tokens
                    talk += [reply.choices[0].message, {"role": "user", "content": "more"}]
                assert open.session.ending is Status.COMPLETED
                return len(open.trajectory.transcripts), open.session.turns, open.trajectory.num_sampled - tokens

        assert set(await asyncio.gather(*[agent() for _ in range(200)])) == {(1, 3, 0)}
        assert service.endpoint._sessions == {}
