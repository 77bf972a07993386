"""Answers that are sent while they are sampled, in the three APIs, and what stays of one that its client left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from tests.openai_api.conftest import ADD, Open, Service, embedded, scripted
from tests.openai_api.test_delivery import APIS, USER, read_until, request, undelivered
from tests.openai_api.test_record import QUESTION
from tests.waiting import until

TURN = "<think>\nHm, two and three.\n</think>\n\nThe sum of two and three is five."
FIRST = "Hm, two"
CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def texts_of(path: str, stream: bytes) -> tuple[str, str]:
    """Reasoning and text of a stream so far."""
    reasoning = text = ""
    for event in stream.split(b"\n\n"):
        data = event.partition(b"data: ")[2]
        if not data.startswith(b"{"):
            continue
        value = json.loads(data)
        if path == "chat/completions":
            for choice in value["choices"]:
                reasoning += choice["delta"].get("reasoning_content") or ""
                text += choice["delta"].get("content") or ""
        elif path == "responses":
            reasoning += value["delta"] if value["type"] == "response.reasoning_text.delta" else ""
            text += value["delta"] if value["type"] == "response.output_text.delta" else ""
        elif value["type"] == "content_block_delta":
            reasoning += value["delta"].get("thinking", "")
            text += value["delta"].get("text", "")
    return reasoning, text


@pytest.mark.parametrize("path", APIS)
async def test_the_first_words_arrive_before_the_turn_has_ended(chat: Chat, path: str) -> None:
    """The engine waits until the client has them."""
    async with scripted(chat, lambda session, turn: TURN + CALL) as (service, engine), service.session() as open:
        engine.held_behind = "The sum of two"
        body = {**APIS[path][0], "stream": True}
        said = b""
        client = httpx.AsyncClient(timeout=30)
        async with client, client.stream("POST", f"{open.base_url}/{path}", json=body) as answer:
            pieces = answer.aiter_bytes()
            while "The sum of" not in texts_of(path, said)[1]:
                said += await anext(pieces)
            assert engine.running == 1 and not open.trajectory.turns
            engine.go_on.set()
            async for piece in pieces:
                said += piece
        assert texts_of(path, said) == ("Hm, two and three.", "The sum of two and three is five.")
        assert [len(turn.calls) for turn in open.trajectory.turns] == [1]
        assert undelivered(open) == (0, 0)


def last_of(path: str, stream: bytes) -> Any:
    """What a stream says at its end of the whole answer."""
    events = [json.loads(one.partition(b"data: ")[2]) for one in stream.split(b"\n\n") if b"data: {" in one]
    return (
        next(one["response"] for one in events if one["type"] == "response.completed") if path == "responses" else None
    )


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("turn", [TURN + CALL, TURN, "Plain text.", CALL.strip(), "<think>\nNot ended", ""])
async def test_a_live_stream_says_what_a_whole_one_says(chat: Chat, path: str, turn: str) -> None:
    """Event by event, where pieces of text are joined, and but for ids and cached tokens."""
    found = []
    for live in (True, False):
        async with scripted(chat, lambda session, number: turn) as (service, engine), service.session() as open:
            if live:
                engine.held_behind = next((one for one in ("The sum", "Plain", "Not") if one in turn), "")
                asyncio.get_running_loop().call_later(0.1, engine.go_on.set)
            else:
                engine.generate = without_listener(engine.generate)
            body = {**APIS[path][0], "stream": True}
            async with httpx.AsyncClient(timeout=30) as client:
                answer = await client.post(f"{open.base_url}/{path}", json=body)
            found.append((texts_of(path, answer.content), shape(answer.content)))
    assert found[0] == found[1]


def without_listener(generate: Any) -> Any:
    async def asked(ids: Any, params: Any, session: str, images: Any = ()) -> Any:
        return await generate(ids, params, session, images)

    return asked


def shape(stream: bytes) -> list[str]:
    """The events of a stream without their texts and ids, one for each run of pieces."""
    found: list[str] = []
    for one in stream.split(b"\n\n"):
        data = one.partition(b"data: ")[2]
        if not data.startswith(b"{"):
            continue
        event = json.loads(data)
        event.pop("sequence_number", None)
        text = json.dumps(hidden(event))
        if not (found and found[-1] == text and "delta" in text):
            found.append(text)
    return found


def hidden(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = ("id", "item_id", "created", "created_at", "signature")
        members = {key: hidden(member) for key, member in value.items() if key not in dropped}
        for key in ("delta", "content", "reasoning_content", "thinking", "text", "partial_json"):
            if members.get(key) and isinstance(members[key], str) and value.get("type") != "message":
                members[key] = "..." if "done" not in str(value.get("type")) else members[key]
        return members
    return [hidden(one) for one in value] if isinstance(value, list) else value


async def left(open: Open, engine: Any, path: str, wanted: str, **more: Any) -> tuple[str, str]:
    """Read a stream up to a text, and leave; return what was read."""

    def act() -> bytes:
        with request(f"{open.base_url}/{path}", {**APIS[path][0], "stream": True, **more}) as connection:
            return read_until(connection, wanted.encode(), 65536)

    said = await asyncio.to_thread(act)
    await until(lambda: not open.session._tasks)
    return texts_of(path, said)


@pytest.mark.parametrize("path", APIS)
async def test_of_an_answer_that_its_client_left_the_delivered_tokens_stay(chat: Chat, path: str) -> None:
    async with scripted(chat, lambda session, turn: TURN) as (service, engine):
        async with service.session() as open:
            engine.held_behind = "The sum of two"
            reasoning, text = await left(open, engine, path, "of")
            assert engine.aborted, "sampling stops at once"
        ((ids,),) = engine.said.values()
        (transcript,) = open.trajectory.transcripts
        kept = transcript.ids[transcript.prompt_length :]
        assert kept == ids[: len(kept)] and len(transcript.logprobs) == len(transcript.ids)
        assert chat.decode(kept) == "<think>\nHm, two and three.\n</think>\n\nThe sum of two"
        assert (reasoning, text) == ("Hm, two and three.", "The sum of two")
        (turn,) = open.trajectory.turns
        assert (turn.text, turn.finish_reason, turn.end) == (text, "abort", len(transcript))
        assert [message["content"] for message in open.trajectory.messages] == ["Hi", text]
        assert open.trajectory.num_sampled == len(kept)
        assert [span.end for span in transcript.versions] == [len(transcript)]


async def test_a_call_with_the_part_that_was_delivered_continues_there(chat: Chat) -> None:
    texts = iter([TURN, "Go on."])
    async with scripted(chat, lambda session, turn: next(texts)) as (service, engine):
        async with service.session() as open:
            engine.held_behind = "The sum of two"
            _, part = await left(open, engine, "chat/completions", "of")
            engine.go_on.set()
            begun = open.trajectory.transcripts[0].ids[:]
            await open.say([USER, {"role": "assistant", "content": part}, {"role": "user", "content": "And?"}])
        (transcript,) = open.trajectory.transcripts
        assert transcript.ids[: len(begun)] == begun
        assert chat.decode(transcript.ids[len(begun) :]).startswith("<|im_end|>\n<|im_start|>user\nAnd?")
        assert [turn.role for turn in open.trajectory.turns] == ["assistant", "user", "assistant"]
        assert undelivered(open)[0] == 0


async def test_the_same_call_again_begins_again(chat: Chat) -> None:
    async with scripted(chat, lambda session, turn: TURN) as (service, engine):
        async with service.session() as open:
            engine.held_behind = "The sum of two"
            await left(open, engine, "chat/completions", "of")
            engine.go_on.set()
            await open.say([USER])
        first, second = open.trajectory.transcripts
        assert first.ids[: first.prompt_length] == second.ids[: second.prompt_length]
        assert chat.decode(second.ids[second.prompt_length :]) == TURN + "<|im_end|>"


async def test_words_of_a_client_behind_a_call_that_it_left_are_no_turn_of_the_policy(chat: Chat) -> None:
    """The record of the call that was left has its prompt alone, and the next one's begins with it."""
    texts = iter([TURN, "Yes."])
    async with scripted(chat, lambda session, turn: next(texts)) as (service, engine), service.session() as open:
        engine.held_behind = "<think>"
        connection = await asyncio.to_thread(request, f"{open.base_url}/chat/completions", {"messages": [USER]})
        await until(lambda: engine.running == 1)
        connection.close()
        await until(lambda: not open.session._tasks)
        await open.say([USER, {"role": "assistant", "content": "Mine."}, {"role": "user", "content": "And?"}])
        assert [turn.role for turn in open.trajectory.turns] == ["user", "assistant"]
        assert len(open.trajectory.transcripts) == 1


@pytest.mark.parametrize("behind", ["<think>\n", "</think>\n\n", "Hm,"])
async def test_an_answer_of_which_nothing_more_was_delivered_keeps_what_was(chat: Chat, behind: str) -> None:
    """Tokens without text that was sent are not delivered."""
    async with scripted(chat, lambda session, turn: TURN) as (service, engine):
        async with service.session() as open:
            engine.held_behind = behind
            connection = await asyncio.to_thread(
                request, f"{open.base_url}/chat/completions", {**APIS["chat/completions"][0], "stream": True}
            )
            if behind != "<think>\n":
                await asyncio.to_thread(read_until, connection, b"Hm", 65536)
            await until(lambda: engine.running == 1)
            await asyncio.sleep(0.05)
            connection.close()
            await until(lambda: not open.session._tasks)
            engine.go_on.set()
        kept = [chat.decode(one.ids[one.prompt_length :]) for one in open.trajectory.transcripts]
        expected = {"<think>\n": "", "Hm,": "<think>\nHm,", "</think>\n\n": "<think>\nHm, two and three."}
        assert kept == [expected[behind]]


async def test_a_session_that_ends_during_a_stream_keeps_what_its_client_has(chat: Chat) -> None:
    """A program that stops at a delta, and does not close its connection before it ends."""
    async with scripted(chat, lambda session, turn: TURN) as (service, engine):
        async with service.session() as open:
            engine.held_behind = "The sum of two"
            stream = await open.say([USER], stream=True)
            async for chunk in stream:
                if "two" in (chunk.choices[0].delta.content or ""):
                    break
        (transcript,) = open.trajectory.transcripts
        assert chat.decode(transcript.ids[transcript.prompt_length :]).endswith("The sum of two")


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [ADD], "tool_choice": "required"},
        {"tools": [ADD], "parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
        {"tools": [ADD], "tool_choice": "none"},
        {"logprobs": True},
        {"return_token_ids": True},
    ],
    ids=lambda more: list(more)[-1],
)
async def test_an_answer_that_may_be_another_one_is_sent_whole(chat: Chat, more: dict[str, Any]) -> None:
    async with scripted(chat, lambda session, turn: "{}" + CALL) as (service, _), service.session() as open:
        lives = []
        begin = open.session.begin

        async def spied(*given: Any) -> Any:
            asked, call, task = await begin(*given)
            lives.append(call.live)
            return asked, call, task

        open.session.begin = spied  # type: ignore[method-assign, assignment]
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"messages": [QUESTION], "stream": True}
            for extra in (more, {}):
                answer = await client.post(f"{open.base_url}/chat/completions", json={**body, **extra})
                assert answer.status_code == 200
        assert lives[0] is None and lives[1] is not None


async def test_a_stop_text_is_never_sent(chat: Chat) -> None:
    text = "One\n\nTwo STOP Three"
    async with scripted(chat, lambda session, turn: text) as (service, engine), service.session() as open:
        engine.held_behind = "Two ST"
        asyncio.get_running_loop().call_later(0.1, engine.go_on.set)
        chunks = [chunk async for chunk in await open.say([USER], stream=True, stop=["STOP"])]
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert said == "One\n\nTwo "


async def test_an_engine_that_fails_behind_some_words_ends_the_stream_with_the_error(chat: Chat) -> None:
    async with scripted(chat, lambda session, turn: TURN) as (service, engine), service.session() as open:
        engine.held_behind = "The sum of two"

        async def fail(*given: Any, listener: Any = None) -> Any:
            listener(chat.encode("Some words"))
            await asyncio.sleep(0.1)
            raise RuntimeError("gone")

        engine.generate = fail
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.post(f"{open.base_url}/chat/completions", json={"messages": [USER], "stream": True})
        assert b"Some" in answer.content and b'"error"' in answer.content
        assert open.session.fault is not None


async def test_every_token_of_a_real_policy_is_streamed_and_recorded_once(chat: Chat, tiny_dir: Any) -> None:
    service: Service
    async with embedded(chat, tiny_dir) as service:
        for path in APIS:
            async with service.session() as open, httpx.AsyncClient(timeout=60) as client:
                answer = await client.post(f"{open.base_url}/{path}", json={**APIS[path][0], "stream": True})
                reasoning, text = texts_of(path, answer.content)
                (turn,) = open.trajectory.turns
                assert text.strip() == turn.text.strip() or reasoning
                assert undelivered(open) == (0, 0)
