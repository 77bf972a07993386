"""Long turns and tool answers are worked on in threads; what is cancelled meanwhile leaves a sound record."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from agentrl.agent_loop import Episode, LoopContext
from agentrl.chat import Chat
from agentrl.chat import chat as chat_module
from agentrl.engines.contract import SamplingParams
from agentrl.tool import session as tool_session
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Trajectory
from tests.agent_loop.conftest import LIMITS, Bench, call, sample
from tests.agent_loop.scripted_engine import ScriptedEngine

MakeBench = Callable[..., Bench]


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
    context = LoopContext(ScriptedEngine(chat, lambda *_: "#### 5"), chat, ToolSet.from_tools([]), {}, LIMITS)
    episode = Episode(context, sample(), Trajectory("t/0", 0), SamplingParams(1), seed=0, session="t/0.0")
    episode.start(sample().prompt)
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
        monkeypatch.setattr(tool_session, "LONG_ANSWER", limit)
        threads: set[int] = set()

        async def page() -> str:
            """Read a page."""
            return "word " * 2000

        b = bench([call("page"), "#### 5"], [page])
        encode = b.scheduler.context.tools.truncation.encode

        def noted(text: str, seen: set[int] = threads, encode: Callable[[str], list[int]] = encode) -> list[int]:
            seen.add(threading.get_ident())
            return encode(text)

        b.scheduler.context.tools.bind(noted, b.chat.decode)
        (t,) = await b.run(sample())
        answers.append([turn.text for turn in t.turns])
        assert (threading.get_ident() in threads) == (limit > 1)
    assert answers[0] == answers[1]
