"""What of a session is trained on: its transcripts by kind, and what each choice leaves out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.errors import CodeError, ConfigError
from agentrl.openai_api.selection import Kind, Selection, SessionTranscript, leave_out, main_of
from tests.naming import Names, assert_names
from tests.openai_api.conftest import ADD, Open, scripted
from tests.openai_api.programs import QUESTION, leave_at, request
from tests.waiting import until

LIMITS = {"max_assistant_turns": 40, "max_response_tokens": 6000, "max_model_len": 20_000}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Write a title of at most five words."}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
FINDINGS = "The parser drops the last byte of each line; the fix is in read_line of reader.py."
TASK = "What is the sum of 2 and 3? Answer with the number alone, and say before it how you have come to know the sum, "
SUMMARY = f"<analysis>The user said this.</analysis> {TASK * 2}. " + (
    "So far the tool was asked once, and it said that the sum is 3, by which it surely did mean the sum of 1 and 2; so "
    "the policy has to ask it again, by the right numbers, and has to answer with what the tool then says it is."
)
"""A summary with the words of the task, of which a program shows the end."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(call: Any, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


class Talk:
    """A conversation of a program with the endpoint."""

    def __init__(self, open: Open, *messages: Any, **more: Any) -> None:
        self.open, self.more = open, more
        self.messages: list[Any] = list(messages)

    async def ask(self, *messages: Any, keep: bool = True, **more: Any) -> Any:
        reply = await self.open.client.chat.completions.create(
            **{"model": "any", "messages": [*self.messages, *messages], **self.more, **more}
        )
        said = reply.choices[0].message
        if keep:
            self.messages += [*messages, said]
        return said


Told = dict[str, tuple[str, bool | str]]


def trained(open: Open, train: str | Sequence[str] = "main", *, by_tools: bool = False) -> Told:
    """By the text of each answer, its kind and whether it is trained on, after the choice."""
    transcripts, trajectory = open.session.transcripts(), open.trajectory
    main = main_of(transcripts, by_tools=by_tools)
    ends = Selection(train).ends(transcripts, main)
    leave_out(trajectory, transcripts, ends)
    kept = {id(turn) for turn in trajectory.trained_turns}
    found: Told = {}
    for turn in trajectory.turns:
        if turn.role == "assistant":
            kind = main.get(turn.transcript, (Kind.SIDE_CALL, 0))[0]
            found[turn.text or turn.calls[0].name] = (str(kind), id(turn) in kept)
    return found


TITLE = {"messages": [user("Title?")], "stream": True}
MAIN, SUB, SIDE = ("main", True), ("sub_agent", True), ("side_call", False)


async def session(chat: Chat, texts: list[str], act: Callable[[Open], Any], **more: Any) -> Open:
    async with scripted(chat, texts, **LIMITS) as (service, _), service.session() as open:
        await act(open)
    return open


async def test_titles_before_and_after_the_work_are_side_calls(chat: Chat) -> None:
    async def act(open: Open) -> None:
        await Talk(open, SYSTEM).ask(user("What is 2 + 3?"))
        main = Talk(open)
        await main.ask(QUESTION)
        await Talk(open, SYSTEM).ask(user("Is this a new topic?"))
        await main.ask(user("Sure?"))

    open = await session(chat, ["Sum of two numbers", "5", "No new topic", "Yes, 5."], act)
    before = len(open.trajectory.messages)
    told = trained(open)
    assert told == {"Sum of two numbers": SIDE, "5": MAIN, "No new topic": SIDE, "Yes, 5.": MAIN}
    assert [message["content"] for message in open.trajectory.messages] == [
        QUESTION["content"],
        "5",
        "Sure?",
        "Yes, 5.",
    ]
    assert before == 10 and [one.trained_to for one in open.trajectory.transcripts] == [0, None, 0]
    assert open.trajectory.outline().prompt_length == open.trajectory.transcripts[1].prompt_length


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in JSON"])
@pytest.mark.parametrize("answer", [FINDINGS, "42"], ids=["long", "short"])
async def test_sub_agents_of_two_levels_count_to_the_main_conversation(chat: Chat, answer: str, wrapped: bool) -> None:
    """Their answers stand in tools' answers. Another sub-agent's answer reached nobody."""

    def shown(text: str) -> str:
        return json.dumps({"agent": "a1", "result": text}, indent=1) if wrapped else f"{text}\nagentId: a1"

    async def act(open: Open) -> None:
        main = Talk(open, tools=[ADD])
        call = (await main.ask(QUESTION)).tool_calls[0]
        helper = Talk(open, user("Find the fault."), tools=[ADD])
        inner_call = (await helper.ask()).tool_calls[0]
        deeper = await Talk(open, user("Read the file.")).ask()
        said = await helper.ask(tool(inner_call, shown(deeper.content)))
        await Talk(open, user("Read another file.")).ask()
        await main.ask(tool(call, shown(said.content)))

    helpers = ["It drops a byte at the end of each line.", answer]
    texts = ["Main." + CALL, "Helper." + CALL, helpers[0], helpers[1], "Nobody reads this long answer.", "Done."]
    open = await session(chat, texts, act)
    assert trained(open) == {
        "Main.": MAIN,
        "Helper.": SUB,
        helpers[0]: SUB,
        helpers[1]: SUB,
        "Nobody reads this long answer.": SIDE,
        "Done.": MAIN,
    }


@pytest.mark.parametrize("used", [True, False])
async def test_a_sub_agent_that_ends_last_is_not_the_main_conversation(chat: Chat, used: bool) -> None:
    """It was begun by a call of the one that is, and may tell it by a user's message, or not at all."""
    spawn = '<tool_call>\n{"name": "spawn", "arguments": {"message": "Is it right?", "fork": false}}\n</tool_call>'

    async def act(open: Open) -> None:
        main = Talk(open, tools=[ADD])
        call = (await main.ask(QUESTION)).tool_calls[0]
        await main.ask(tool(call, "Begun."))
        reminder = "<system-reminder>\nThe folder is /work.\n</system-reminder>\n\n"
        helper = Talk(open, user("Rules."), user(f"{reminder}Is it right?"), user(reminder))
        said = await helper.ask()
        if used:
            await main.ask(user(f"<note>\n<result>{said.content}</result>\n</note>"))
        await helper.ask(user("More?"))

    texts = ["Main." + spawn, "I wait.", "It is.", *["It is good."] * used, "No more."]
    open = await session(chat, texts, act)
    found = trained(open)
    assert found["Main."] == found["I wait."] == MAIN and found["No more."][1] is False
    assert found["It is."] == (SUB if used else SIDE)


@pytest.mark.parametrize("chosen", [0, 1])
async def test_of_parallel_branches_the_one_that_was_taken_further_is_trained_on(chat: Chat, chosen: int) -> None:
    """The turns before them are, too, once, whichever transcript holds them; the other branch's are not."""
    answers = iter(["Begin.", "One.", "Two.", "End."])

    async def act(open: Open) -> None:
        main = Talk(open)
        await main.ask(QUESTION)
        branches = [await main.ask(user("Go."), keep=False) for _ in range(2)]
        main.messages += [user("Go."), branches[chosen]]
        await main.ask(user("And?"))

    open = await session(chat, list(answers), act)
    told = trained(open)
    taken, other = ("One.", "Two.") if chosen == 0 else ("Two.", "One.")
    assert told == {"Begin.": MAIN, taken: MAIN, other: ("main", False) if chosen else SIDE, "End.": MAIN}
    ends = [one.trained_to for one in open.trajectory.transcripts]
    assert ends == ([None, 0] if chosen == 0 else [open.trajectory.turns[0].end, None])
    texts = [message["content"] for message in open.trajectory.messages]
    assert other not in texts and texts[-3:] == [taken, "And?", "End."]


async def test_a_retry_replaces_the_answer_before(chat: Chat) -> None:
    """The client read the answer, and asks again."""

    async def act(open: Open) -> None:
        main = Talk(open)
        await main.ask(QUESTION)
        await main.ask(user("Go."), keep=False)
        await main.ask(user("Go."))

    open = await session(chat, ["Begin.", "Rejected.", "Taken."], act)
    assert trained(open) == {"Begin.": MAIN, "Rejected.": ("main", False), "Taken.": MAIN}
    batch_tokens = sum(one.trained_length for one in open.trajectory.transcripts)
    assert batch_tokens == sum(
        turn.end - turn.start for turn in open.trajectory.turns if turn.text in ("Begin.", "Taken.")
    )


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "rejected"])
@pytest.mark.parametrize("apart", [True, False], ids=["own call", "same conversation"])
async def test_a_compaction_is_trained_on_where_its_summary_is_used(chat: Chat, taken: bool, apart: bool) -> None:
    async def act(open: Open) -> None:
        main = Talk(open, tools=[ADD])
        call = (await main.ask(user(TASK))).tool_calls[0]
        await main.ask(tool(call, "3"))
        if apart:
            written = "\n".join(str(message) for message in main.messages)
            summary = await Talk(open, user(f"Summarise:\n{written}")).ask()
        else:
            summary = await main.ask(user("Summarise."), keep=False)
        if taken:
            shown = "\n".join(f"> {line}" for line in summary.content.split(". ")[1:])
            main = Talk(open, user(f"Continued from before:\n{shown}"), tools=[ADD])
            await main.ask()
        else:
            await main.ask(user("And?"))
            main.more = {}
            await main.ask(user(TASK))

    open = await session(chat, ["Main." + CALL, "It says three, as it had to be.", SUMMARY, "End.", "Again."], act)
    told = trained(open)
    assert told["End."] == MAIN
    assert told[SUMMARY][1] == taken
    assert told["Main."] == told["It says three, as it had to be."] == MAIN


@pytest.mark.parametrize("change", ["tools", "system", "reasoning"])
async def test_a_conversation_goes_on_under_other_tools_or_another_system_message(chat: Chat, change: str) -> None:
    """Its earlier turns, which are calls alone, stand in the new transcript's prompt."""
    more = {**ADD, "function": {**ADD["function"], "name": "subtract"}}  # type: ignore[dict-item]

    async def act(open: Open) -> None:
        main = Talk(open, tools=[ADD])
        call = (await main.ask(QUESTION)).tool_calls[0]
        await Talk(open, SYSTEM).ask(user("What is it about?"))
        if change == "tools":
            main.more = {"tools": [ADD, more]}
        elif change == "system":
            main.messages.insert(0, {"role": "system", "content": "Be exact."})
        else:
            main.messages[0] = user("What is 2 + 3, again?")
        await main.ask(tool(call, "3"))

    open = await session(chat, [CALL, "About a sum", "End."], act)
    assert trained(open) == {"add": MAIN, "About a sum": SIDE, "End.": MAIN}
    assert len(open.trajectory.transcripts) == 3


async def test_answers_that_broke_a_promise_go_with_the_one_that_kept_it(chat: Chat) -> None:
    """Without them training would see only answers that happen to hold a call."""

    async def act(open: Open) -> None:
        main = Talk(open, tools=[ADD])
        await main.ask(QUESTION, tool_choice="required")
        await Talk(open, user("Other."), tools=[ADD]).ask(tool_choice="required")
        await main.ask(tool(main.messages[-1].tool_calls[0], "3"))

    open = await session(chat, ["no", "never", "Yes." + CALL, "not so", "Side." + CALL, "End."], act)
    told = trained(open)
    assert {text for text, (_, kept) in told.items() if kept} == {"no", "never", "Yes.", "End."}


async def test_a_session_whose_every_answer_broke_its_promise_is_trained_on(chat: Chat) -> None:
    async def act(open: Open) -> None:
        with pytest.raises(Exception, match="tool_use_failed"):
            await Talk(open, tools=[ADD]).ask(QUESTION, tool_choice="required")

    open = await session(chat, [f"no {number}" for number in range(4)], act)
    assert set(trained(open).values()) == {MAIN} and len(open.trajectory.transcripts) == 4


async def test_an_answer_of_which_nothing_was_read_is_not_in_the_record(chat: Chat) -> None:
    """The program leaves before the first token of a title; its main conversation ended before."""
    async with scripted(chat, ["5", "Sums"]) as (service, engine), service.session() as open:
        await Talk(open).ask(QUESTION)
        engine.all_run.clear()
        engine.together = 2  # The call would wait for another one.
        connection = await asyncio.to_thread(request, f"{open.base_url}/chat/completions", TITLE)
        await until(lambda: engine.running == 1)
        connection.close()
        await until(lambda: not open.session._tasks)
    assert trained(open) == {"5": MAIN}


async def test_an_answer_that_was_read_in_part_is_not_the_last_one(chat: Chat) -> None:
    """The program leaves in the middle of a title; its main conversation ended before."""
    async with scripted(chat, ["5", "Sums of numbers"]) as (service, engine), service.session() as open:
        await Talk(open).ask(QUESTION)
        engine.held_behind = "Sums of"
        await asyncio.to_thread(leave_at, f"{open.base_url}/chat/completions", TITLE, b" of", 65536)
        await until(lambda: not open.session._tasks)
    assert trained(open) == {"5": MAIN, "Sums of": SIDE}


async def test_names_of_models(chat: Chat) -> None:
    """A conversation's beginning counts to it, also where another transcript holds it."""

    async def act(open: Open) -> None:
        await Talk(open, model="small").ask(user("Title?"))
        main = Talk(open, model="large")
        await main.ask(QUESTION)
        await main.ask(user("Go."), keep=False)
        await main.ask(user("Go."), model="other")

    texts = ["Title", "Begin.", "Large.", "Other."]
    open = await session(chat, texts, act)
    assert {text for text, (_, kept) in trained(open, ["large"]).items() if kept} == {"Begin.", "Large."}
    open = await session(chat, texts, act)
    assert {text for text, (_, kept) in trained(open, ["other", "small"]).items() if kept} == {
        "Title",
        "Begin.",
        "Other.",
    }
    open = await session(chat, texts, act)
    transcripts = open.session.transcripts()
    assert Selection(["none"]).ends(transcripts, main_of(transcripts)) == {}
    assert "they named large, other, small" in Selection(["none"]).nothing(transcripts)


def chooser(tmp_path: Path, body: str) -> str:
    file = tmp_path / "choose.py"
    file.write_text(f"def choose(transcripts):\n    {body}\n")
    return f"{file}:choose"


async def test_a_function(chat: Chat, tmp_path: Path) -> None:
    async def act(open: Open) -> None:
        await Talk(open, SYSTEM).ask(user("Title?"))
        main = Talk(open)
        await main.ask(QUESTION)
        await main.ask(user("Sure?"))

    open = await session(chat, ["Sum", "5", "Yes."], act)
    body = "return [one for one in transcripts if one.kind == 'side_call' and one.opened == 'first']"
    assert [kept for _, kept in trained(open, chooser(tmp_path, body)).values()] == [True, False, False]
    seen: list[SessionTranscript] = open.session.transcripts()
    assert [one.opened for one in seen] == ["first", "new"]
    assert [message["role"] for message in seen[1].messages] == ["user", "assistant", "user", "assistant"]
    assert seen[1].models == {"any"} and seen[1].answers[-1].message["content"] == "Yes."


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return transcripts[7]", "IndexError"),
        ("return None", "found None"),
        ("return [0]", "found [0]"),
        ("return transcripts[0]", "transcripts"),
    ],
)
async def test_a_wrong_function_is_an_error_of_its_code(chat: Chat, tmp_path: Path, body: str, says: Names) -> None:
    open = await session(chat, ["5"], lambda open: Talk(open).ask(QUESTION))
    with pytest.raises(CodeError) as told:
        trained(open, chooser(tmp_path, body))
    assert_names(told.value, says, "openai_proxy.train=", "choose.py")


@pytest.mark.parametrize(
    ("target", "says"),
    [("no_such_module:choose", "no_such_module"), ("json:dumps_", "dumps_"), ("time:time", "one argument")],
)
def test_a_function_that_cannot_be_loaded_is_refused_by_its_key(target: str, says: Names) -> None:
    with pytest.raises(ConfigError) as told:
        Selection(target)
    assert_names(told.value, says, "openai_proxy.train")


async def test_samples_of_a_conversation_do_not_depend_on_other_calls(chat: Chat) -> None:
    """Seeds are by the prompt: calls before, between and at once with others change none of them."""

    async def alone(open: Open) -> None:
        main = Talk(open)
        await main.ask(QUESTION)
        await main.ask(user("Sure?"))

    async def among_others(open: Open) -> None:
        await Talk(open, SYSTEM).ask(user("Title?"))
        main = Talk(open)
        await asyncio.gather(main.ask(QUESTION), Talk(open, SYSTEM).ask(user("Topic?")))
        await Talk(open, SYSTEM).ask(user("Title?"))
        await main.ask(user("Sure?"))

    def seeds(open: Open) -> dict[tuple[int, ...], int | None]:
        found = {}
        for turn in open.trajectory.turns:
            if turn.role == "assistant":
                found[tuple(open.trajectory.transcripts[turn.transcript].ids[: turn.start])] = turn.seed
        return found

    # The service numbers sessions, and a session's number is its seed.
    both = [seeds(await session(chat, ["Yes."] * 6, act)) for act in (alone, among_others)]
    assert len(both[0]) == 2 and both[0].items() <= both[1].items()
    assert len(set(both[1].values())) == len(both[1])


QUOTED = """Sum up:
<conversation>
[User]: {task}

[Assistant tool call]: add({arguments})
[Tool result]: 3
</conversation>"""


async def test_a_conversation_that_a_summary_was_asked_of_counts_with_all_of_its_answers(chat: Chat) -> None:
    """OpenCode quotes it, shortened, and Claude Code takes the tags from the summary."""
    summary = "<summary>\nThe sum is three, I think.\n</summary>"

    async def act(open: Open) -> None:
        main = Talk(open, tools=[ADD])
        call = (await main.ask(user(TASK))).tool_calls[0]
        await main.ask(tool(call, "3"))
        await Talk(open).ask(user(QUOTED.format(task=TASK, arguments=call.function.arguments)))
        await Talk(open, tools=[ADD]).ask(
            user("Before this, in short:\nSummary:\nThe sum is three, I think.\n\nGo on.")
        )

    told = trained(await session(chat, [CALL, "Yes.", summary, "End."], act))
    assert told == {"add": MAIN, "Yes.": MAIN, summary: MAIN, "End.": MAIN}


@pytest.mark.parametrize("by_tools", [True, False])
async def test_a_summary_of_work_that_is_over_is_a_side_call_of_a_program_that_acts_by_tools(
    chat: Chat, by_tools: bool
) -> None:
    async def act(open: Open) -> None:
        await Talk(open, tools=[ADD]).ask(user(TASK))
        await Talk(open).ask(user("Sum up."))

    told = trained(await session(chat, ["The work.", "A summary."], act), by_tools=by_tools)
    assert told == {"The work.": MAIN if by_tools else SIDE, "A summary.": SIDE if by_tools else MAIN}


INVALID: list[Any] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "invalid", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "There is no such tool."},
]


@pytest.mark.parametrize("instead", [[user("Your answer had no call.")], INVALID], ids=["taken out", "edited"])
async def test_an_answer_that_the_program_replaced_counts_to_the_conversation(chat: Chat, instead: list[Any]) -> None:
    """mini-swe-agent takes out an answer without a call, and OpenCode edits a call of a tool that is not there."""

    async def act(open: Open) -> None:
        main = Talk(open, tools=[ADD])
        await main.ask(user(TASK), keep=False)
        main.messages += [user(TASK), *instead]
        await main.ask()
        await main.ask(user("And?"), keep=False)  # A client that asks again has replaced nothing.
        await main.ask(user("And?"))

    told = trained(await session(chat, ["Wrong.", "Right.", "Again.", "End."], act))
    assert told == {"Wrong.": MAIN, "Right.": MAIN, "Again.": ("main", False), "End.": MAIN}
