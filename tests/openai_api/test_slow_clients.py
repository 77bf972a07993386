"""Clients that read slowly, never, or half: what they were given stays, and no memory grows for them."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.openai_api.endpoint import Endpoint
from agentrl.system.delivery import Watched
from tests.naming import naming
from tests.openai_api.conftest import Open, Service, scripted
from tests.openai_api.programs import PROGRAMS, USER, Program, events_of, read_until, request
from tests.openai_api.test_record import recorded, said
from tests.waiting import until

MANY = {"max_model_len": 120_000, "max_response_tokens": 110_000}
TEXT = "one \U0001f600 two é three, " * 80


def paced(engine: Any, most_between: float = 0.01) -> None:
    engine.pieces, engine.most_between = random.Random(1), most_between


def kept(chat: Chat, open: Open) -> str:
    (transcript,) = open.trajectory.transcripts
    return chat.decode(transcript.ids[transcript.prompt_length :]).removesuffix("<|im_end|>")


async def test_a_client_that_never_reads_holds_little_of_100_000_tokens(chat: Chat) -> None:
    text, held = "word " * 50_000, list[int]()
    async with scripted(chat, lambda session, turn: text, **MANY) as (service, engine):
        engine.pieces, engine.most_between = random.Random(1), 0.0
        async with service.session() as open:
            calls = spied(open)
            body = {"messages": [USER], "stream": True}
            connection = await asyncio.to_thread(request, f"{open.base_url}/chat/completions", body)
            while not calls or open.session._tasks:
                for call in calls:
                    if (watched := call.delivery._connection) is not None:
                        held.append(watched.transport.get_write_buffer_size())
                await asyncio.sleep(0.005)
            connection.close()
        ((ids,),) = engine.said.values()
        assert len(ids) > 90_000 and max(held) < 1 << 20
        assert text.startswith(kept(chat, open)) and open.trajectory.num_sampled < 0.1 * len(ids)
        assert open.trajectory.metrics["openai_undelivered_tokens"] == len(ids) - open.trajectory.num_sampled


def spied(open: Open) -> list[Any]:
    """Calls of the session as they begin."""
    begin, calls = open.session.begin, list[Any]()

    async def beginning(*given: Any) -> Any:
        begun = await begin(*given)
        calls.append(begun[1])
        return begun

    open.session.begin = beginning  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_client_that_reads_byte_by_byte_and_leaves(chat: Chat, program: type[Program]) -> None:
    """Of a piece that it read in part nothing stays, and no more than it was sent."""

    def act(url: str) -> bytes:
        with request(url, {**program.least, "stream": True}) as connection:
            seen = b""
            while len(seen) < 1500:
                seen += connection.recv(1)
            return seen

    async with scripted(chat, lambda session, turn: TEXT, **MANY) as (service, engine):
        paced(engine)
        async with service.session() as open:
            await asyncio.to_thread(act, program.url_of(open))
            await until(lambda: not open.session._tasks)
        ((ids,),) = engine.said.values()
        assert open.trajectory.num_sampled < len(ids)
        assert not open.trajectory.num_sampled or TEXT.startswith(kept(chat, open))


async def test_a_client_that_left_before_its_request_had_its_turn(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call ends, and nothing counts as delivered, though the connection was lost before it was followed."""
    arrived, lost, lose = asyncio.Event(), asyncio.Event(), Watched.connection_lost

    def losing(self: Watched, exc: Exception | None) -> None:
        lose(self, exc)
        lost.set()

    async def in_turn(self: Endpoint) -> None:
        arrived.set()
        await lost.wait()
        await asyncio.sleep(0)  # the socket is closed after the protocol has heard of it

    async with scripted(chat, lambda session, turn: TEXT, **MANY) as (service, engine):
        paced(engine)
        async with service.session() as open:
            monkeypatch.setattr(Watched, "connection_lost", losing)
            monkeypatch.setattr(Endpoint, "_in_turn", in_turn)
            calls, body = spied(open), {"messages": [USER], "stream": True}
            connection = await asyncio.to_thread(request, f"{open.base_url}/chat/completions", body)
            await arrived.wait()
            connection.close()
            await until(lambda: bool(calls))
            delivery = calls[0].delivery
            assert (delivery.tokens, delivery.whole, delivery.is_under_way) == (0, False, False)
            await until(lambda: not open.session._tasks)
        assert open.trajectory.num_sampled == 0


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_client_that_ends_its_side_has_left(chat: Chat, program: type[Program]) -> None:
    """As uvicorn holds it. What it still reads begins with what is recorded."""

    def act(url: str) -> bytes:
        with request(url, {**program.least, "stream": True}) as connection:
            seen = read_until(connection, b"one", 65536)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                seen += piece
            return seen

    async with scripted(chat, lambda session, turn: TEXT, **MANY) as (service, engine):
        paced(engine)
        async with service.session() as open:
            seen = await asyncio.to_thread(act, program.url_of(open))
            await until(lambda: not open.session._tasks)
        assert kept(chat, open) and program.texts_of(events_of(seen))[1].startswith(kept(chat, open))
        ((ids,),) = engine.said.values()
        assert open.trajectory.num_sampled < len(ids), "sampling ended"


async def test_calls_over_one_prefix_while_one_of_them_streams(chat: Chat) -> None:
    """Each has a transcript of its own, with the same tokens before it, whoever ends first."""
    texts = iter(["Yes.", TEXT, "First.", "Second.", "Third."])
    service: Service
    async with scripted(chat, lambda session, turn: next(texts), **MANY) as (service, engine):
        paced(engine, 0.02)
        async with service.session() as open:
            first = (await open.say([USER])).choices[0].message
            talk = [USER, first, {"role": "user", "content": "And?"}]
            stream = await open.say(talk, stream=True)
            words = [chunk async for chunk in after_one(stream)]
            others = await asyncio.gather(*[open.say(talk) for _ in range(3)])
            words += [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in words).strip() == TEXT.strip()
            assert sorted(other.choices[0].message.content for other in others) == ["First.", "Second.", "Third."]
        assert recorded(open.trajectory) == said(engine)
        one, *more = open.trajectory.transcripts
        prompts = [transcript.ids[: engine_prompt(engine, number)] for number, transcript in enumerate((one, *more))]
        assert len(more) == 3 and all(prompt == prompts[0] for prompt in prompts)


def engine_prompt(engine: Any, transcript: int) -> int:
    """Tokens before the last answer of a transcript."""
    return len(engine.prompts[f"s1.{transcript}"][-1])


async def after_one(stream: Any) -> Any:
    """Take chunks up to the first with text."""
    async for chunk in stream:
        yield chunk
        if chunk.choices[0].delta.content:
            return


async def test_several_answers_at_once_are_refused_in_a_stream_too(chat: Chat) -> None:
    async with scripted(chat, ["a"]) as (service, engine), service.session() as open:
        with naming(Exception, "n=2"):
            await open.say([USER], stream=True, n=2)
        assert not engine.said
