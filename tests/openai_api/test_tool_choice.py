"""`tool_choice` and `parallel_tool_calls`: what is asked again, what is recorded of it, and where it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from agentrl.chat import Chat
from agentrl.trajectory import Status
from tests.agent_loop.conftest import call
from tests.naming import naming
from tests.openai_api.conftest import ADD, embedded, scripted
from tests.openai_api.programs import QUESTION
from tests.openai_api.test_http import streamed
from tests.openai_api.test_record import recorded, said

CALL = call("add", a=2, b=3)
NAMED = {"type": "function", "function": {"name": "add"}}
MUL = {"type": "function", "function": {**ADD["function"], "name": "mul"}}  # type: ignore[dict-item]
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>'


@pytest.mark.parametrize(
    ("first", "more"),
    [
        ("I would rather talk.", {"tool_choice": "required"}),
        (BROKEN, {"tool_choice": "required"}),
        (call("div", a=1), {"tool_choice": "required"}),
        (call("mul", a=1, b=1), {"tool_choice": NAMED}),
        (CALL + CALL, {"parallel_tool_calls": False}),
        (CALL + CALL, {"parallel_tool_calls": False, "tool_choice": "required"}),
    ],
)
async def test_an_answer_that_breaks_the_promise_is_recorded_and_asked_again(
    chat: Chat, first: str, more: dict[str, Any]
) -> None:
    async with scripted(chat, [first, CALL, "#### 5"]) as (service, engine), service.session() as open:
        answer = await open.say([QUESTION], tools=[ADD, MUL], **more)
        (one,) = answer.choices[0].message.tool_calls
        assert (one.function.name, answer.choices[0].finish_reason, answer.tries) == ("add", "tool_calls", 2)
        left, kept = open.trajectory.transcripts
        assert left.ids[: left.prompt_length] == kept.ids[: kept.prompt_length]
        assert recorded(open.trajectory) == said(engine), "what was sampled is trained on, sent or not"
        assert open.trajectory.metrics["openai_asked_again"] == 1 and open.session.turns == 2
        assert open.trajectory.metrics["openai_calls"] == 1
        talk = [QUESTION, answer.choices[0].message, {"role": "tool", "tool_call_id": one.id, "content": "5"}]
        last = await open.say(talk, tools=[ADD, MUL])
        assert last.choices[0].message.content == "#### 5" and not hasattr(last, "tries")
        assert len(open.trajectory.transcripts) == 2 and open.trajectory.turns[-1].transcript == 1
        assert [len(turn.calls) for turn in open.trajectory.turns if turn.role == "assistant"] == [0, 1, 0]


@pytest.mark.parametrize("more", [{}, {"tool_choice": "auto"}, {"tool_choice": "none", "parallel_tool_calls": False}])
async def test_what_promises_nothing_is_sampled_once(chat: Chat, more: dict[str, Any]) -> None:
    async with scripted(chat, [CALL + BROKEN]) as (service, _), service.session() as open:
        answer = await open.say([QUESTION], tools=[ADD], **more)
        assert len(answer.choices[0].message.tool_calls or ()) == (0 if "parallel_tool_calls" in more else 2)


async def test_the_first_answer_that_keeps_it_is_the_only_one(chat: Chat) -> None:
    async with scripted(chat, [CALL]) as (service, _), service.session() as open:
        assert (await open.say([QUESTION], tools=[ADD], tool_choice="required")).tries == 1
        assert len(open.trajectory.transcripts) == 1 and "openai_asked_again" not in open.trajectory.metrics


async def test_where_no_answer_keeps_it_the_error_says_what_each_was(chat: Chat) -> None:
    async with (
        scripted(chat, ["no", BROKEN, call("mul", a=1), "no!", "fine", CALL, "#### 5"]) as (service, engine),
        service.session() as open,
    ):
        with pytest.raises(openai.BadRequestError) as told:
            await open.say([QUESTION], tools=[ADD], tool_choice="required")
        assert (told.value.code, told.value.param) == ("tool_use_failed", "tool_choice")
        for words in ("answer 1 made no call", "answer 2 made a broken call", "answer 3 called 'mul'", "answer 4 made"):
            assert words in str(told.value)
        assert (open.session.ending, open.session.turns) == (Status.MALFORMED, 4)
        assert open.trajectory.metrics["openai_promise_broken"] == 1
        assert recorded(open.trajectory) == said(engine)
        # The same call again samples anew at the same place, and never goes on behind an answer that was not sent.
        again = await open.say([QUESTION], tools=[ADD], tool_choice="required")
        assert (again.tries, open.session.ending) == (2, Status.COMPLETED)
        prompts = {tuple(t.ids[: t.prompt_length]) for t in open.trajectory.transcripts}
        assert len(prompts) == 1 and len(open.trajectory.transcripts) == 6


async def test_greedy_answers_are_all_the_same_so_one_is_enough(chat: Chat) -> None:
    async with scripted(chat, ["no"]) as (service, _), service.session() as open:
        open.session.episode.params = replace(open.session.episode.params, temperature=0.0)
        with pytest.raises(openai.BadRequestError, match="answer 1 made no call"):
            await open.say([QUESTION], tools=[ADD], tool_choice="required")
        assert open.session.turns == 1


@pytest.mark.parametrize(
    ("limits", "first", "status"),
    [
        ({"max_assistant_turns": 2}, "no", Status.TURN_LIMIT),
        ({"max_response_tokens": 5}, "word " * 40, Status.LENGTH),
    ],
)
async def test_the_budgets_hold_for_what_is_asked_again(
    chat: Chat, limits: dict[str, int], first: str, status: Status
) -> None:
    async with scripted(chat, lambda session, turn: first, **limits) as (service, _), service.session() as open:
        with pytest.raises(openai.BadRequestError) as told:
            await open.say([QUESTION], tools=[ADD], tool_choice="required")
        assert told.value.code == "context_length_exceeded" and "answer 1" in str(told.value)
        assert open.session.ending is status
        assert open.session.turns == (2 if status is Status.TURN_LIMIT else 1)


async def test_a_stream_begins_with_the_answer_that_was_kept(chat: Chat) -> None:
    async with scripted(chat, ["no", CALL]) as (service, _), service.session() as open:
        message, chunks = await streamed(open, [QUESTION], tools=[ADD], tool_choice=NAMED)
        assert message["content"] == "" and [name for _, name, _ in message["calls"]] == ["add"]
        assert chunks[0].tries == 2


async def test_a_real_policys_tries_are_samples_of_their_own(chat: Chat, tiny_dir: Path) -> None:
    async with embedded(chat, tiny_dir) as service, service.session() as open:
        with pytest.raises(openai.BadRequestError, match="answer 4"):
            await open.say([QUESTION], tools=[ADD], tool_choice="required", max_tokens=12)
        answers = [tuple(t.ids[t.prompt_length :]) for t in open.trajectory.transcripts]
        assert len(set(answers)) == len(answers) == 4


async def test_a_format_that_reads_no_calls_cannot_be_made_to_call(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(chat, ["x"]) as (service, engine), service.session() as open:
        monkeypatch.setattr(chat.format, "parses_tools", False)
        with naming(openai.BadRequestError, "no tool calls") as told:
            await open.say([QUESTION], tools=[ADD], tool_choice="required")
        assert told.value.param == "tool_choice" and engine.prompts == {}
