"""Long turns, prompts and answers are worked on in threads; what is cancelled meanwhile leaves a sound record."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from agentrl.agent_loop import Episode, LoopContext
from agentrl.chat import Chat
from agentrl.chat import chat as chat_module
from agentrl.engines.contract import SamplingParams
from agentrl.system import threads
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status, Trajectory
from tests.agent_loop.conftest import LIMITS, Bench, call, sample
from tests.agent_loop.scripted_engine import ScriptedEngine

MakeBench = Callable[..., Bench]


def episode_of(chat: Chat, engine: ScriptedEngine | None = None) -> Episode:
    engine = engine or ScriptedEngine(chat, lambda *_: "#### 5")
    context = LoopContext(engine, chat, ToolSet.from_tools([]), {}, LIMITS)
    return Episode(context, sample(), Trajectory("t/0", 0), SamplingParams(1), seed=0, session="t/0.0")


async def test_a_turn_that_is_cancelled_while_it_is_read_leaves_no_token(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "LONG_TURN", 1)
    begun, go_on, parse = threading.Event(), threading.Event(), chat.parse

    def slow(*words: object) -> object:
        begun.set()
        go_on.wait(20)
        return parse(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(chat, "parse", slow)
    episode = episode_of(chat)
    await episode.start(sample().prompt)
    prompt = list(episode.transcript.ids)
    turn = asyncio.create_task(episode.generate())
    while not begun.is_set():
        await asyncio.sleep(0)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert (episode.transcript.ids, episode.trajectory.turns) == (prompt, [])
    go_on.set()
    assert (await episode.generate()).message.text == "#### 5"
    assert episode.transcript.ids[len(prompt) :] == [*chat.encode("#### 5"), chat.stop_token_ids[0]]


async def test_long_answers_are_cut_in_a_thread(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str]] = []
    for limit in (1, 10**9):
        monkeypatch.setattr(threads, "LONG_TEXT", limit)
        ran: set[int] = set()

        async def page() -> str:
            """Read a page."""
            return "word " * 2000

        b = bench([call("page"), "#### 5"], [page])
        encode = b.scheduler.context.tools.truncation.encode

        def noted(text: str, seen: set[int] = ran, encode: Callable[[str], list[int]] = encode) -> list[int]:
            seen.add(threading.get_ident())
            return encode(text)

        b.scheduler.context.tools.bind(noted, b.chat.decode)
        (t,) = await b.run(sample())
        answers.append([turn.text for turn in t.turns])
        assert (threading.get_ident() in ran) == (limit > 1)
    assert answers[0] == answers[1]


WRITES = ["render", "bridge", "encode", "drift"]
"""Methods of `Chat` that write messages as ids, at one place or another of this trajectory."""


async def converse(episode: Episode, word: str) -> list[int]:
    """Meet every place at which an episode writes messages as ids; return those of its transcript."""
    await episode.start([{"role": "user", "content": word * 20}])
    await episode.generate()
    await episode.observe([{"role": "user", "content": word * 20}])
    await episode.generate()
    episode.finish(Status.COMPLETED)
    await episode.count_drift()
    ids = list(episode.transcript.ids)
    await episode.observe_text(word * 20)
    return ids + episode.transcript.ids[len(ids) :]


@pytest.mark.parametrize("long", [True, False])
async def test_only_long_texts_are_written_in_a_thread(chat: Chat, monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    word = "hello é <|im_end|> "
    expected = await converse(episode_of(chat), word)
    monkeypatch.setattr(threads, "LONG_TEXT", 20 * len(word) + (not long) * 10**6)
    seen: dict[str, set[int]] = {name: set() for name in WRITES}

    def noting(name: str) -> Callable[..., object]:
        method = getattr(chat, name)

        def noted(*words: object, **named: object) -> object:
            if len(str(words)) > 20 * len(word):  # not the marker of what is cut
                seen[name].add(threading.get_ident())
            return method(*words, **named)

        return noted

    for name in WRITES:
        monkeypatch.setattr(chat, name, noting(name))
    assert await converse(episode_of(chat), word) == expected
    loop = threading.get_ident()
    assert {name: loop not in ran for name, ran in seen.items() if ran} == dict.fromkeys(WRITES, long)


@pytest.mark.parametrize("place", ["start", "observe"])
async def test_what_is_cancelled_while_it_is_written_leaves_no_token(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(threads, "LONG_TEXT", 1)
    episode, said = episode_of(chat), [{"role": "user", "content": "And then?"}]
    await episode.start(sample().prompt)
    await episode.generate()
    before = (episode.index, list(episode.transcript.ids), list(episode.messages), len(episode.trajectory.turns))
    begun, go_on, name = threading.Event(), threading.Event(), {"start": "render", "observe": "bridge"}[place]
    write = getattr(chat, name)

    def slow(*words: object, **named: object) -> object:
        begun.set()
        go_on.wait(20)
        return write(*words, **named)

    monkeypatch.setattr(chat, name, slow)
    step = getattr(episode, place)
    writing = asyncio.create_task(step(said))
    while not begun.is_set():
        await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert (episode.index, episode.transcript.ids, episode.messages, len(episode.trajectory.turns)) == before
    go_on.set()
    await step(said)
    assert episode.messages[-1] == said[0]
