"""Requests that are too long, or long: refused before they are rendered, or rendered beside the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from agentrl.agent_loop.teacher_context import with_teacher_context
from agentrl.chat import Chat
from agentrl.openai_api import chat_completions
from agentrl.openai_api.completion import Completion
from agentrl.system import threads
from agentrl.system.json_value import JSON
from tests.naming import naming
from tests.openai_api.conftest import scripted
from tests.openai_api.programs import QUESTION

LONG = {"role": "user", "content": "word " * 20_000}


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([{"role": "user", "content": "word " * 800_000}], "messages", "context_length_exceeded"),
        ([{"role": "user", "content": "é" * 25_000}] * 2, "messages", "context_length_exceeded"),
        ([QUESTION] * 100_000, "messages", "invalid_value"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}],
            "messages",
            "context_length_exceeded",
        ),
    ],
    ids=["4 MB", "two texts", "100,000 messages", "100,000 parts"],
)
async def test_what_cannot_fit_is_never_rendered(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, messages: list[Any], param: str, code: str
) -> None:
    async with scripted(chat, ["ok"]) as (service, engine), service.session() as open, httpx.AsyncClient() as raw:
        rendered: list[int] = []
        monkeypatch.setattr(chat.format, "render", lambda *_: rendered.append(1))
        answer = await raw.post(f"{open.base_url}/chat/completions", json={"messages": messages}, timeout=30)
        assert answer.status_code == 400 and not rendered and engine.prompts == {}
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code) and len(error["message"]) < 400


def test_no_text_has_fewer_tokens_than_its_bound(chat: Chat) -> None:
    longest = chat.most_characters(1)
    assert longest is not None
    for text in ("word " * 500, "=" * 2000, "e\u0301" * 300, "中文" * 200, "".join(chat.tokenizer.get_vocab())):
        assert chat.most_characters(len(chat.encode(text))) >= len("".join(text.split()))  # type: ignore[operator]


async def test_blanks_do_not_count(chat: Chat) -> None:
    """Templates may strip them."""
    async with scripted(chat, ["ok"], max_model_len=200) as (service, _), service.session() as open:
        most = open.session._most_characters
        assert most is not None
        with naming(openai.BadRequestError, "prompt"):  # it was rendered
            await open.say([{"role": "user", "content": "a" + " " * 2 * most + "b"}])
        with pytest.raises(openai.BadRequestError, match="characters"):
            await open.say([{"role": "user", "content": "ab" * most}])


@pytest.mark.parametrize("place", ["prompt", "answer"])
async def test_others_are_answered_while_a_long_request_is_rendered(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    loop_thread = threading.get_ident()

    def slow(write: Any) -> Any:
        def written(*args: Any, **named: Any) -> Any:
            if len(str(args)) > 50_000:
                assert threading.get_ident() != loop_thread
                begun.set()
                assert go_on.wait(60)
            return write(*args, **named)

        return written

    limits = {"max_model_len": 200_000, "max_response_tokens": 200_000}
    async with scripted(chat, lambda session, turn: "ok", **limits) as (service, _), service.session() as open:
        talk: list[Any] = []
        if place == "answer":
            talk = [QUESTION, (await open.say([QUESTION])).choices[0].message]
        monkeypatch.setattr(chat, "render", slow(chat.render))
        monkeypatch.setattr(chat, "bridge", slow(chat.bridge))
        long = asyncio.create_task(open.say([*talk, LONG]))
        assert await asyncio.to_thread(begun.wait, 60)
        async with service.session() as other:
            for _ in range(5):
                assert (await other.say([QUESTION])).choices[0].message.content == "ok"
        if talk:  # the place is taken: a branch of its own
            await open.say([*talk, {"role": "user", "content": "short"}])
        assert not long.done()
        go_on.set()
        assert (await long).choices[0].message.content == "ok"
        assert len(open.trajectory.transcripts) == (2 if talk else 1)


@pytest.mark.timeout(300)
async def test_the_event_loop_goes_on_while_a_long_text_is_encoded(chat: Chat) -> None:
    limits = {"max_model_len": 10**6, "max_response_tokens": 10**6}
    gaps = [0.0]

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)

    async with scripted(chat, ["ok"], **limits) as (service, _), service.session() as open:
        text = " ".join(f"w{k}" for k in range(100_000))
        beating = asyncio.create_task(beat())
        began = time.monotonic()
        await open.say([{"role": "user", "content": text}])
        seconds = time.monotonic() - began
        beating.cancel()
        assert max(gaps) < seconds / 2, (max(gaps), seconds)


async def test_a_session_that_ends_meanwhile_is_not_begun(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    render = chat.render

    def slow(*args: Any, **more: Any) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        return render(*args, **more)

    async with scripted(chat, ["ok"], max_model_len=200_000) as (service, engine), service.session() as open:
        monkeypatch.setattr(chat, "render", slow)
        call = asyncio.create_task(open.say([LONG]))
        assert await asyncio.to_thread(begun.wait, 60)
        await open.session.close()
        go_on.set()
        with pytest.raises(openai.NotFoundError):
            await call
        assert engine.prompts == {} and open.session.turns == 0 and open.trajectory.transcripts == []


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends meanwhile"])
async def test_others_are_answered_while_a_teachers_prompt_is_rendered(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The request is short, and what a privileged teacher is shown with it is long."""
    begun, go_on, told = threading.Event(), threading.Event(), "word " * 5_000
    loop_thread, render = threading.get_ident(), chat.render

    def slow(messages: list[Any], *tools: Any, **more: Any) -> list[int]:
        if told in str(messages):
            assert threading.get_ident() != loop_thread
            begun.set()
            assert go_on.wait(60)
        return render(messages, *tools, **more)

    monkeypatch.setattr(chat, "render", slow)
    async with scripted(chat, lambda session, turn: "ok") as (service, engine), service.session() as open:
        episode = open.session.episode
        episode.context = replace(episode.context, teacher_context=lambda _: told)
        call = asyncio.create_task(open.say([QUESTION]))
        assert await asyncio.to_thread(begun.wait, 60)
        async with service.session() as other:
            assert (await other.say([QUESTION])).choices[0].message.content == "ok"
        if ends:
            await open.session.close()
        go_on.set()
        if ends:
            with pytest.raises(openai.NotFoundError):
                await call
            assert len(engine.prompts) == 1 and open.session.turns == 0 and open.trajectory.transcripts == []
        else:
            assert (await call).choices[0].message.content == "ok"
            (transcript,) = open.trajectory.transcripts
            assert transcript.teacher_prompt == render(with_teacher_context([QUESTION], told))


async def test_a_long_prompt_is_not_remembered(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.chat.chat.CACHED_CHARACTERS", 1000)
    known = len(chat._prompts)
    chat.render([{"role": "user", "content": "x" * 2000}])
    assert len(chat._prompts) == known


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_answer_is_written_beside_the_event_loop(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    ran: set[int] = set()
    logprobs = chat_completions.logprobs

    def noted(completion: Completion) -> dict[str, JSON] | None:
        ran.add(threading.get_ident())
        return logprobs(completion)

    monkeypatch.setattr(chat_completions, "logprobs", noted)
    for limit in (1, 10**9):
        monkeypatch.setattr(threads, "LONG_TEXT", limit)
        ran.clear()
        async with scripted(chat, ["ok"]) as (service, _), service.session() as open:
            answer = await open.say([QUESTION], logprobs=True, stream=stream)
            if stream:
                assert "".join([part.choices[0].delta.content or "" async for part in answer if part.choices]) == "ok"
            else:
                assert answer.choices[0].message.content == "ok" and answer.choices[0].logprobs.content
        assert (threading.get_ident() in ran) == (limit > 1)
