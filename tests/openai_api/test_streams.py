"""Answers that are sent while they are sampled, and what stays of one that its client left."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from tests.openai_api.conftest import ADD, scripted
from tests.openai_api.contract import CALL, TURN, left
from tests.openai_api.programs import QUESTION, USER, ChatProgram, read_until, request, undelivered
from tests.waiting import until


async def test_a_call_with_the_part_that_was_delivered_continues_there(chat: Chat) -> None:
    texts = iter([TURN, "Go on."])
    async with scripted(chat, lambda session, turn: next(texts)) as (service, engine):
        async with service.session() as open:
            engine.held_behind = "The sum of two"
            _, part = await left(open, ChatProgram, "of")
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
            await left(open, ChatProgram, "of")
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
                request, f"{open.base_url}/chat/completions", {"messages": [USER], "stream": True}
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

        open.session.begin = spied  # type: ignore[method-assign]
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
