"""How calls are joined: what is a branch, what is a session, and in which time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.trajectory import Message
from data_prep.records import Record
from data_prep.traces import sessions
from data_prep.traces.__main__ import main
from data_prep.traces.forms import Reader
from data_prep.traces.sessions import Call, Session, Tree, join
from tests.data_prep.test_traces import write_lines, written


def call(*turns: str, system: str = "Be brief.", **more: Any) -> dict[str, Any]:
    """A log's record: turns of the user and the assistant by turns, the last one the answer."""
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns[:-1], strict=False)]
    request = {"model": "m", "messages": [{"role": "system", "content": system}, *messages]}
    answer = {"role": "assistant", "content": turns[-1]}
    return {"request": request, "response": {"choices": [{"message": answer, "finish_reason": "stop"}]}, **more}


def rows(tmp_path: Path, *records: dict[str, Any], more: tuple[str, ...] = ()) -> list[tuple[str, int, str]]:
    """(session, branch, the turns with a * at those that are not learnt)."""
    source = write_lines(tmp_path / "log.jsonl", list(records))
    assert main(["--source", str(source), "--out", str(tmp_path / "out"), *more]) == 0
    return [
        (row["session"], row["branch"], " ".join(told(one) for one in row["messages"] if one["role"] != "system"))
        for row in written(tmp_path / "out")
    ]


def told(message: dict[str, Any]) -> str:
    return str(message["content"]) + ("*" if message["weight"] == 0 else "")


FIRST, SECOND = ("a", "1"), ("a", "1", "b", "2")
ONE, TWO = "session-000001", "session-000002"


@pytest.mark.parametrize("backwards", [False, True])
def test_a_call_continues_the_one_that_its_prompt_begins_with(tmp_path: Path, backwards: bool) -> None:
    log = [call(*FIRST), call("x", "y"), call(*SECOND), call(*SECOND, "c", "3")]
    found = rows(tmp_path, *(log[::-1] if backwards else log))
    assert [text for _, _, text in sorted(found, key=lambda row: len(row[2]))] == ["x y", "a 1 b 2 c 3"]
    assert len({session for session, _, _ in found}) == 2


def test_a_second_answer_and_an_edited_question_are_branches_and_no_turn_is_learnt_twice(tmp_path: Path) -> None:
    log = [call(*FIRST), call(*SECOND), call("a", "1", "b", "3"), call("a", "1", "B", "4"), call("a", "5")]
    assert rows(tmp_path, *log) == [
        (ONE, 0, "a 1 b 2"),
        (ONE, 1, "a 5"),
        (ONE, 2, "a 1* b 3"),
        (ONE, 3, "a 1* B 4"),
    ]


def test_the_same_answer_to_the_same_prompt_is_one_turn_of_a_session(tmp_path: Path) -> None:
    assert rows(tmp_path, *(call(*turns, session="s") for turns in (FIRST, FIRST, SECOND))) == [("s", 0, "a 1 b 2")]
    assert rows(tmp_path, call(*FIRST, id="x"), call(*FIRST, id="x"), call(*SECOND)) == [(ONE, 0, "a 1 b 2")]


def test_without_ids_the_same_answer_is_somebody_elses(tmp_path: Path) -> None:
    """Each keeps its feedback, and each goes on by itself."""
    log = [
        call(*FIRST, id="x", feedback=1),
        call(*FIRST, id="y", feedback=-1),
        call(*FIRST),
        call(*SECOND),
        call(*SECOND),
    ]
    three = "session-000003"
    assert rows(tmp_path, *log) == [(ONE, 0, "a 1"), (TWO, 0, "a 1 b 2"), (three, 0, "a 1 b 2")]
    assert [row["feedback"] for row in written(tmp_path / "out")] == [1, -1, None]


def test_a_turn_that_no_call_answered_is_shown_alone(tmp_path: Path) -> None:
    """A few examples in the prompt; an answer that the program changed; calls that are not in the log."""
    log = [call("a", "1"), call("a", "1 changed", "b", "2"), call("a", "1 changed", "b", "2", "c", "3", "d", "4")]
    assert rows(tmp_path, *log) == [(ONE, 0, "a 1"), (ONE, 1, "a 1 changed* b 2 c 3* d 4")]


def test_other_system_prompts_and_tools(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    other = call(*SECOND)
    other["request"]["tools"] = [tool]
    log = [call(*FIRST), call(*SECOND, system="Be long."), other]
    assert rows(tmp_path, *log) == [(ONE, 0, "a 1"), (ONE, 1, "a 1* b 2"), (TWO, 0, "a 1* b 2")]
    tools = [row["tools"] for row in written(tmp_path / "out")]
    assert tools[0] is None and json.loads(tools[1]) == [tool]


def test_ids_join_and_part(tmp_path: Path) -> None:
    """A session's id decides; a trace's id only joins, as the next question of a session is often another trace."""
    log = [
        call("a", "1", session="s"),
        call("summary", "2", system="Summarize.", session="s"),
        call("a", "1", session="t"),
        call("q", "1", trace_id="one"),
        call("sub", "2", system="Search.", trace_id="one"),
        call("q", "1", "r", "3", trace_id="two"),
    ]
    third = "session-000003"
    assert rows(tmp_path, *log) == [
        ("s", 0, "a 1"),
        ("s", 1, "summary 2"),
        ("t", 0, "a 1"),
        (third, 0, "q 1 r 3"),
        (third, 1, "sub 2"),
    ]


@pytest.mark.parametrize("backwards", [False, True])
def test_a_trace_whose_session_is_named_later_is_of_that_session(tmp_path: Path, backwards: bool) -> None:
    log = [call("a", "1", trace_id="t"), call("sub", "2", system="Search.", trace_id="t", session="s")]
    found = rows(tmp_path, *(log[::-1] if backwards else log), {"session": "s", "feedback": 1})
    assert sorted(found) == [("s", 0, found[0][2]), ("s", 1, found[1][2])]
    assert [row["feedback"] for row in written(tmp_path / "out")] == [1, 1]


def test_calls_are_taken_by_time(tmp_path: Path) -> None:
    log = [
        call("a", "late", time="2026-05-01T12:00:02Z"),
        call("a", "early", time=1777636800),
        call("a", "middle", time="1777636801000"),
    ]
    assert [text for _, _, text in rows(tmp_path, *log)] == ["a early", "a middle", "a late"]
    assert next(row["began"] for row in written(tmp_path / "out")) == "2026-05-01T12:00:00+00:00"


@pytest.mark.parametrize(
    "odd", ["0001-01-01T00:00:00+05:00", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-05:00", "1", -1, 1e300, "9" * 20]
)
def test_a_time_that_is_none_is_not_taken(tmp_path: Path, odd: Any) -> None:
    log = [call(*FIRST, time=odd, created_at="2026-05-01T12:00:02Z"), call("x", "y", startTime=odd)]
    assert [text for _, _, text in rows(tmp_path, *log)] == ["a 1", "x y"]
    began = [row["began"] for row in written(tmp_path / "out")]
    assert began == ["2026-05-01T12:00:02+00:00", None]


def test_messages_are_the_same_in_every_spelling(tmp_path: Path) -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
    }

    def turn(id: str, arguments: str, content: Any) -> dict[str, Any]:
        function = {"name": "add", "arguments": arguments}
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        }

    def asked(*messages: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        request = {"messages": list(messages), "tools": [tool]}
        return {"request": request, "response": {"choices": [{"message": answer, "finish_reason": "stop"}]}}

    question = {"role": "user", "content": "a"}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    log = [
        asked(question, answer=turn("x1", '{"a":1,"b":[ 2.0]}', None)),
        asked(
            parts,
            turn("y7", '{"b": [2], "a": 1}', ""),
            {"role": "tool", "tool_call_id": "y7", "content": "3"},
            answer={"role": "assistant", "content": "4"},
        ),
    ]
    assert rows(tmp_path, *log) == [(ONE, 0, "a  3 4")]
    other = asked(
        question,
        turn("x1", '{"a": 1, "b": [3]}', None),
        {"role": "tool", "tool_call_id": "x1", "content": "3"},
        answer={"role": "assistant", "content": "4"},
    )
    assert rows(tmp_path, log[0], other) == [(ONE, 0, "a "), (ONE, 1, "a * 3 4")]


def test_held_out_rows_are_of_other_sessions(tmp_path: Path) -> None:
    log = [call(f"q{number}", answer, session=f"s{number}") for number in range(40) for answer in ("1", "2")]
    kept = rows(tmp_path, *log, more=("--held-out", "0.25"))
    held = written(tmp_path / "out", "held_out")
    assert len(kept) == 60 and len(held) == 20
    assert not {row["session"] for row in held} & {session for session, _, _ in kept}
    rows(tmp_path, *log[::-1], more=("--held-out", "0.25"))
    assert {row["session"] for row in written(tmp_path / "out", "held_out")} == {row["session"] for row in held}


def test_joining_takes_steps_that_are_linear_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of the tree that are looked at are counted, not seconds."""
    steps, up = 0, Tree.up

    def counted(tree: Tree, place: int) -> Iterator[int]:
        nonlocal steps
        for one in up(tree, place):
            steps += 1
            yield one

    def counted_steps(sessions: int) -> int:
        nonlocal steps
        reader, calls, steps = Reader(), list[Call](), 0
        for number in range(sessions):
            turns: list[str] = []
            for turn in range(4):
                turns += [f"q{number % 3} {turn}", f"a{number} {turn}"]
                calls += reader.calls(Record("", call(*turns)))
        join(calls, reader.tree)
        return steps

    monkeypatch.setattr(Tree, "up", counted)
    assert counted_steps(80) < 2.2 * counted_steps(40)


def test_a_chain_of_kept_answers_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are read are counted: a request goes on from the one before, and does not repeat it."""
    steps, read = 0, Tree.extended

    def counted(tree: Tree, place: int, messages: Sequence[Message], *defaults: Any) -> int:
        nonlocal steps
        steps += len(messages)
        return read(tree, place, messages, *defaults)

    monkeypatch.setattr(Tree, "extended", counted)
    reader = Reader()
    for number in range(50):
        output: Any = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "1"}]}]
        more = {"previous_response_id": f"resp_{number - 1}"} if number else {}
        body = {"input": f"q{number}", "instructions": "Be brief.", **more}
        (made,) = reader.calls(Record("", {"request": body, "response": {"id": f"resp_{number}", "output": output}}))
    assert made.depth == 100 and len(reader.shown.path(made.shown)) == 100
    assert steps <= 5 * 50 + 2


@pytest.mark.parametrize("own", [True, False])
def test_many_people_who_say_the_same_are_joined_in_linear_time(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """Sessions of their own, and answers of one session that differ in their reasoning: comparisons are counted."""
    steps = 0

    def counted(self: object, other: object = None) -> bool:
        nonlocal steps
        steps += 1
        return self is other

    def reasoning(call: Call) -> tuple[str | None, ...]:
        counted(call)
        return of_call(call)

    of_call = sessions.reasoning
    monkeypatch.setattr(sessions, "reasoning", reasoning)
    monkeypatch.setattr(Session, "__eq__", counted)

    def count(number: int) -> int:
        nonlocal steps
        tree, calls, steps = Tree(), list[Call](), 0
        prompt = tree.extended(0, [{"role": "user", "content": "ping"}])
        end = tree.extended(prompt, [{"role": "assistant", "content": "pong"}])
        for one in range(number):
            answer: Message = {"role": "assistant", "content": "pong", "reasoning_content": str(one)}
            calls.append(Call("", "chat", prompt, end, [answer], "", session=f"s{one if own else 0}", depth=1))
        joined = join(calls, tree)
        assert len(joined.sessions) == (number if own else 1) and not joined.repeated
        return steps

    assert count(200) < 2.2 * count(100)


def test_reasoning_is_kept_where_it_was_logged(tmp_path: Path) -> None:
    """Programs rarely send it back. Two answers with the same words and other reasoning are two turns."""

    def thinking(number: str, *turns: str) -> dict[str, Any]:
        made = call(*turns)
        made["response"]["choices"][0]["message"]["reasoning"] = f"thought {number}"
        return made

    assert rows(tmp_path, thinking("1", *FIRST), thinking("2", *SECOND), thinking("3", *FIRST)) == [
        (ONE, 0, "a 1 b 2"),
        (ONE, 1, "a 1"),
    ]
    thoughts = [[one["reasoning_content"] for one in row["messages"]] for row in written(tmp_path / "out")]
    assert thoughts == [[None, None, "thought 1", None, "thought 2"], [None, None, "thought 3"]]


def test_choices_of_one_call_are_branches_and_the_chosen_one_goes_on(tmp_path: Path) -> None:
    several = call("a", "1")
    several["request"]["n"] = 2
    message = {"role": "assistant", "content": "other"}
    several["response"]["choices"].append({"index": 1, "message": message, "finish_reason": "stop"})
    assert rows(tmp_path, several, call("a", "other", "b", "2")) == [(ONE, 0, "a 1"), (ONE, 1, "a other b 2")]


def whole(*turns: str, **more: Any) -> dict[str, Any]:
    """A record that is a conversation with all of its answers."""
    roles = ["user", "assistant"] * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)], **more}


@pytest.mark.parametrize("backwards", [False, True])
def test_a_whole_conversation_that_was_logged_after_each_answer_is_learnt_once(tmp_path: Path, backwards: bool) -> None:
    log = [whole(*FIRST), whole(*SECOND), whole(*SECOND, "c", "3"), whole("a", "9")]
    found = rows(tmp_path, *(log[::-1] if backwards else log))
    assert sorted(text for _, _, text in found) == ["a 1 b 2 c 3", "a 9"]
    assert len({session for session, _, _ in found}) == 2


def test_the_same_whole_conversation_of_two_people_is_two_sessions(tmp_path: Path) -> None:
    assert rows(tmp_path, whole(*SECOND), whole(*SECOND)) == [(ONE, 0, "a 1 b 2"), (TWO, 0, "a 1 b 2")]
    log = [whole(*FIRST, id="x", feedback=-1), whole(*SECOND, id="y", feedback=1), whole(*SECOND, id="y")]
    assert rows(tmp_path, *log) == [("x", 0, "a 1"), ("y", 0, "a 1 b 2")]
    assert [row["feedback"] for row in written(tmp_path / "out")] == [-1, 1]


def test_feedback_on_a_whole_conversation_is_about_its_last_answer(tmp_path: Path) -> None:
    log = [whole(*SECOND, session="s", feedback=1), whole("a", "1", "B", "3", session="s", feedback=-1)]
    assert rows(tmp_path, *log) == [("s", 0, "a 1 b 2"), ("s", 1, "a 1* B 3")]
    assert [row["feedback"] for row in written(tmp_path / "out")] == [1, -1]


def with_call(number: int, answer: str | None, **more: Any) -> dict[str, Any]:
    """A record whose prompt has a call with a large number, or whose answer is that call."""
    properties = {"id": {"type": "integer"}, "unit": {"type": "string", "default": "C"}}
    tool = {"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": properties}}}
    function = {"name": "w", "arguments": json.dumps({"id": number})}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    made = call("q", answer or "", **more)
    made["request"]["tools"] = [tool]
    if answer is None:
        made["response"]["choices"][0]["message"] = turn
    else:
        made["request"]["messages"] += [turn, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    return made


LARGE = 1234567890123456788


def test_no_text_of_another_session_is_shown(tmp_path: Path) -> None:
    """Reasoning and spellings that make no difference to the joining stay where they were written."""

    def after(thought: str | None, session: str) -> dict[str, Any]:
        made = call("q", "a", "r", f"of {session}", session=session)
        made["request"]["messages"][2] |= {} if thought is None else {"reasoning_content": thought}
        return made

    for log in ([after("private", "s"), after(None, "t")], [after(None, "t"), after("private", "s")]):
        rows(tmp_path, *log)
        shown = {row["session"]: row["messages"][2]["reasoning_content"] for row in written(tmp_path / "out")}
        assert shown == {"s": "private", "t": None}
    rows(tmp_path, *(with_call(LARGE + number, "x", session=f"s{number}") for number in range(2)))
    calls = [row["messages"][2]["tool_calls"][0]["function"]["arguments"] for row in written(tmp_path / "out")]
    assert [json.loads(one)["id"] for one in calls] == [LARGE, LARGE + 1]


def test_answers_with_other_large_numbers_are_other_answers(tmp_path: Path) -> None:
    log = [with_call(LARGE, None, session="s"), with_call(LARGE + 1, None, session="s")]
    assert len(rows(tmp_path, *log, with_call(LARGE + 1, "x", session="s"))) == 2
    last = written(tmp_path / "out")[1]["messages"]
    assert last[-1]["content"] == "x" and str(LARGE + 1) in last[2]["tool_calls"][0]["function"]["arguments"]


def test_a_server_that_keeps_an_answer_keeps_its_own(tmp_path: Path) -> None:
    """Two sessions with the same words and other reasoning."""

    def said(number: str, input: str, **more: Any) -> dict[str, Any]:
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": f"thought {number}"}]}
        part = {"type": "output_text", "text": "1"}
        output = [thought, {"type": "message", "role": "assistant", "content": [part]}]
        return {"request": {"input": input, **more}, "response": {"id": f"resp_{number}", "output": output}}

    rows(tmp_path, said("1", "a"), said("2", "a"), said("3", "b", previous_response_id="resp_2", tools=[]))
    thoughts = [[one["reasoning_content"] for one in row["messages"]] for row in written(tmp_path / "out")]
    assert [None, "thought 2", None, "thought 3"] in thoughts and [None, "thought 1"] in thoughts
