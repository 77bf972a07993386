"""What a log may hold: the forms of several programs, streams, feedback, and all kinds of bad records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.tool_conversations import main as tool_conversations
from data_prep.traces.__main__ import main
from tests.data_prep.test_trace_sessions import FIRST, ONE, SECOND, call, rows
from tests.data_prep.test_traces import write_lines, written

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
SYSTEM, USER = QUESTION
ANSWER = {"role": "assistant", "content": "1"}
CHAT = {"id": "chatcmpl-1", "choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]}
BLOCKS = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "1"}]}
ITEMS = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "1"}]}]
CHUNKS: list[dict[str, Any]] = [
    {
        "object": "chat.completion.chunk",
        "id": "c",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
    },
    {"object": "chat.completion.chunk", "id": "c", "choices": [{"index": 0, "delta": {"content": "1"}}]},
    {"object": "chat.completion.chunk", "id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "m", "role": "assistant", "content": [], "model": "m"}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "1"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    {"type": "message_stop"},
]
FORMS: dict[str, dict[str, Any]] = {
    "request and response": {"request": {"messages": QUESTION}, "response": CHAT},
    "JSON text": {"request": json.dumps({"messages": QUESTION}), "response": json.dumps(CHAT)},
    "bodies of HTTP": {
        "request": {"url": "/v1/chat/completions", "body": json.dumps({"messages": QUESTION})},
        "response": {"status_code": 200, "body": json.dumps(CHAT)},
    },
    "Helicone": {
        "request_id": "r",
        "request_body": {"messages": QUESTION},
        "response_body": CHAT,
        "response_status": 200,
    },
    "LiteLLM": {"id": "i", "call_type": "acompletion", "messages": QUESTION, "response": CHAT, "model_parameters": {}},
    "flat": {"messages": QUESTION, **CHAT, "object": "chat.completion"},
    "Langfuse": {"type": "GENERATION", "input": QUESTION, "output": ANSWER},
    "Langfuse, with tools": {"type": "GENERATION", "input": {"messages": QUESTION, "tools": None}, "output": ANSWER},
    "Langfuse, text": {"type": "GENERATION", "input": QUESTION, "output": "1"},
    "messages": {"request": {"system": "Be brief.", "messages": [USER], "max_tokens": 9}, "response": BLOCKS},
    "messages, flat": {"system": [{"type": "text", "text": "Be brief."}], "messages": [USER], **BLOCKS},
    "responses": {
        "request": {"input": "a", "instructions": "Be brief."},
        "response": {"output": ITEMS, "id": "resp_1"},
    },
    "responses, flat": {"input": QUESTION, "output": ITEMS, "object": "response"},
    "chunks": {"request": {"messages": QUESTION, "stream": True}, "response": CHUNKS},
    "server-sent events": {
        "request": {"messages": QUESTION},
        "response": "".join(f"data: {json.dumps(one)}\n\n" for one in CHUNKS) + "data: [DONE]\n\n",
    },
    "lines of events": {"request": {"messages": QUESTION}, "response": [json.dumps(one) for one in CHUNKS]},
    "events": {"request": {"system": "Be brief.", "messages": [USER]}, "response": EVENTS},
    "text of events": {
        "request": {"system": "Be brief.", "messages": [USER]},
        "response": "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in EVENTS),
    },
    "events of responses": {
        "request": {"instructions": "Be brief.", "input": [USER]},
        "response": [
            {"type": "response.created", "response": {"output": []}},
            {"type": "response.completed", "response": {"output": ITEMS, "status": "completed"}},
        ],
    },
    "an answer that the client began": {
        "request": {"system": "Be brief.", "messages": [USER, {"role": "assistant", "content": ""}][:1]},
        "response": BLOCKS,
    },
    "newer fields": {
        "request": {"messages": QUESTION, "n": 1, "top_logprobs": 3, "effort_2027": {"x": 1}, "logit_bias": {"1": 2}},
        "response": {**CHAT, "carbon": 1},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call(tmp_path: Path, form: str) -> None:
    assert rows(tmp_path, FORMS[form]) == [(ONE, 0, "a 1")]
    (row,) = written(tmp_path / "out")
    assert row["messages"][0]["content"] == "Be brief." and row["tools"] is None


def test_all_forms_in_one_array_and_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "log" / "of" / "may"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps([{**one, "session": "s"} for one in FORMS.values()]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps(call(*SECOND, session="s")) + "\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    assert main(["--source", str(tmp_path / "log"), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["repeated_calls"] == len(FORMS) - 1 and report["sessions"] == report["rows"] == 1
    assert report["not_read"]["chat: effort_2027"] == 1 and not report["dropped"]


def parts(*calls: tuple[str, str, str]) -> dict[str, Any]:
    """A stream whose calls all have the index 0: parts of (id, name, arguments)."""
    made = [{"index": 0, "id": id, "function": {"name": name or None, "arguments": given}} for id, name, given in calls]
    chunks = [{**CHUNKS[1], "choices": [{"index": 0, "delta": {"tool_calls": [one]}}]} for one in made]
    city = {"parameters": {"type": "object", "properties": {"city": {}}}}
    tools = [{"type": "function", "function": one} for one in ({"name": "now"}, {"name": "weather", **city})]
    return {"request": {"messages": QUESTION, "tools": tools}, "response": [*chunks, CHUNKS[2]]}


@pytest.mark.parametrize(
    ("calls", "made"),
    [
        ([("c1", "now", ""), ("c2", "weather", '{"city": '), ("", "", "1}")], ["now {}", 'weather {"city": 1}']),
        ([("c1", "now", "{}"), ("c2", "now", "{}")], ["now {}", "now {}"]),
        ([("c1", "weather", ""), ("c2", "", '{"city": '), ("c3", "", "1}")], ['weather {"city": 1}']),
        ([("c1", "weather", '{"city": '), ("c1", "weather", "1}")], ['weather {"city": 1}']),
    ],
)
def test_parts_of_calls_that_have_one_index(tmp_path: Path, calls: list[tuple[str, str, str]], made: list[str]) -> None:
    """Parallel calls, and servers that repeat the name or give each part a new id."""
    rows(tmp_path, parts(*calls))
    found = [one["function"] for one in written(tmp_path / "out")[0]["messages"][-1]["tool_calls"]]
    assert [f"{one['name']} {one['arguments']}" for one in found] == made


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\x0cb"])
def test_lines_of_events_end_only_where_their_standard_says(tmp_path: Path, text: str) -> None:
    chunk = {**CHUNKS[1], "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}", "", "data: [DONE]", "", ""]
    for response in ("\n".join(lines), "\r\n".join(lines), "\r".join(lines), lines):
        rows(tmp_path, {"request": {"messages": QUESTION}, "response": response})
        assert written(tmp_path / "out")[0]["messages"][-1]["content"].startswith("a")


def test_a_prefilled_answer_is_one_turn(tmp_path: Path) -> None:
    begun = {"system": "Be brief.", "messages": [USER, {"role": "assistant", "content": "It is"}]}
    blocks = {**BLOCKS, "content": [{"type": "text", "text": " 1"}]}
    assert rows(tmp_path, {"request": begun, "response": blocks}) == [(ONE, 0, "a It is 1")]


def test_a_server_that_keeps_conversations(tmp_path: Path) -> None:
    """By the id of the answer, in whatever order the log has them; by a conversation's id; by items' ids."""

    def answered(number: int, input: Any, **more: Any) -> dict[str, Any]:
        part = {"type": "output_text", "text": f"answer {number}"}
        items = [{"type": "message", "id": f"m{number}", "role": "assistant", "content": [part]}]
        return {"request": {"input": input, **more}, "response": {"id": f"resp_{number}", "output": items}}

    chain = [
        answered(1, "a", instructions="One."),
        answered(2, "b", instructions="Two.", previous_response_id="resp_1"),
        answered(3, "c", previous_response_id="resp_2"),
    ]
    texts = ["a answer 1", "a answer 1* b answer 2", "a answer 1* b answer 2* c answer 3"]
    assert [text for _, _, text in rows(tmp_path, *chain[::-1])] == texts
    held = [answered(4, "a", conversation="conv_1"), answered(5, "b", conversation={"id": "conv_1"})]
    assert rows(tmp_path, *held) == [("conv_1", 0, "a answer 4 b answer 5")]
    for number, one in enumerate(held):
        one["response"]["created_at"] = 1_800_000_000 + number
    assert rows(tmp_path, *held[::-1], held[1]) == [("conv_1", 0, "a answer 4 b answer 5")], "by time, and each once"
    items = [
        answered(6, "a"),
        answered(
            7,
            [
                {"role": "user", "content": "a"},
                {"type": "item_reference", "id": "m6"},
                {"role": "user", "content": "b"},
            ],
        ),
    ]
    assert rows(tmp_path, *items) == [(ONE, 0, "a answer 6 b answer 7")]


def test_a_session_may_be_called_conversation(tmp_path: Path) -> None:
    """It is a server's conversation only in Responses: the requests of others hold all messages."""
    log = [{**FORMS["flat"], "id": f"c{number}", "conversation": "s"} for number in range(2)]
    log.append({**FORMS["flat"], "messages": [*QUESTION, ANSWER, USER], "conversation": "s"})
    log.append({**FORMS["messages, flat"], "conversation": {"id": "s"}})
    assert rows(tmp_path, *log) == [("s", 0, "a 1 a 1")]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["records_used"] == 4 and not report["dropped"]


PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5Er"
    "kJggg=="
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
BAD: dict[str, tuple[dict[str, Any] | str, str]] = {
    "a cut line": ('{"request": {"messages": [{"role": "user", "con', "expected a JSON object"),
    "another value": ("[1]", "expected a JSON object"),
    "no answer": ({"request": {"messages": QUESTION}}, "a call without an answer"),
    "an empty answer": (
        {**FORMS["Langfuse"], "output": {**ANSWER, "content": ""}},
        "it says nothing and calls no tool",
    ),
    "an error": ({"request": {"messages": QUESTION}, "response": {"error": {"message": "slow down"}}}, "slow down"),
    "a status": ({"request": {"messages": QUESTION}, "response": {"status_code": 429, "body": "{}"}}, "HTTP 429"),
    "a failure": ({"messages": QUESTION, "response": {}, "error_str": "RateLimitError: slow"}, "RateLimitError: slow"),
    "a page": ({"request": {"messages": QUESTION}, "response": "<html>502"}, "an answer that is no JSON"),
    "a cut answer": (
        {"request": {"messages": QUESTION}, "response": {"choices": [{"message": ANSWER, "finish_reason": "length"}]}},
        "an answer that was cut by a limit",
    ),
    "a cut stream": ({"request": {"messages": QUESTION}, "response": CHUNKS[:2]}, "a stream that was cut"),
    "an unknown part": (
        {"request": {"messages": [{"role": "user", "content": [{"type": "hologram", "data": "x"}]}]}, "response": CHAT},
        "messages[0].content[0].type",
    ),
    "an unknown item": ({"request": {"input": [{"type": "dream_call"}]}, "response": {"output": ITEMS}}, "input[0]"),
    "an image": (
        {
            "request": {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image_url",
                                "image_url": {"url": PICTURE},
                            }
                        ],
                    }
                ]
            },
            "response": CHAT,
        },
        "an image",
    ),
    "an unknown record": ({"level": "info", "text": "started"}, "unknown form"),
    "a whole conversation that a limit cut": (
        {"messages": [*QUESTION, ANSWER], "finish_reason": "length"},
        "an answer that was cut by a limit",
    ),
    "a whole conversation with a cut turn": (
        {"messages": [*QUESTION, {**ANSWER, "finish_reason": "length"}, USER, ANSWER]},
        "an answer that was cut by a limit",
    ),
    "a whole conversation that failed": (
        {"messages": [*QUESTION, ANSWER], "error": {"message": "slow down"}},
        "slow down",
    ),
    "a whole conversation without an answer": ({"messages": [*QUESTION, ANSWER, USER]}, "its messages end with user"),
    "a whole conversation that stopped at an error": ({"messages": QUESTION, "error": {"code": 504}}, "504"),
    "a whole conversation with an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER]},
        "a part image_url",
    ),
    "a whole conversation with an empty turn": (
        {"messages": [*QUESTION, {"role": "assistant", "content": ""}, USER, ANSWER]},
        "an assistant's turn is empty",
    ),
    "a whole conversation with an answer to no call": (
        {"messages": [USER, {"role": "tool", "tool_call_id": "x", "content": "1"}, ANSWER]},
        "roles are out of order",
    ),
    "a whole conversation with nothing to learn": (
        {"messages": [*QUESTION, {**ANSWER, "weight": 0}]},
        "without a turn to learn",
    ),
    "an image that is none": (
        {
            "request": {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                    }
                ]
            },
            "response": CHAT,
        },
        "a part image_url",
    ),
    "a message alone": ({"conversation_id": "s", "role": "user", "content": "a"}, "as `messages`"),
    "a continued answer": (
        {"request": {"input": "a", "previous_response_id": "resp_gone"}, "response": {"output": ITEMS}},
        "continues an answer that is not in the log: 'resp_gone'",
    ),
    "a stored prompt": ({"request": {"input": "a", "prompt": {"id": "p"}}, "response": {"output": ITEMS}}, "'prompt'"),
    "a call of no tool": (
        {
            "request": {"messages": QUESTION, "tools": [TOOL]},
            "response": {
                "choices": [
                    {
                        "message": {
                            "role": "assistant",
                            "tool_calls": [
                                {"id": "c", "type": "function", "function": {"name": "sub", "arguments": "{}"}}
                            ],
                        },
                        "finish_reason": "tool_calls",
                    }
                ]
            },
        },
        "a call of a tool that is not listed: 'sub'",
    ),
    "a call whose arguments have a member twice": (
        {
            "request": {
                "messages": [USER],
                "max_tokens": 9,
                "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            },
            "response": [
                EVENTS[0],
                {**EVENTS[1], "content_block": {"type": "tool_use", "id": "c", "name": "add", "input": {}}},
                {**EVENTS[2], "delta": {"type": "input_json_delta", "partial_json": '{"a": 1, "a": 2}'}},
                *EVENTS[3:],
            ],
        },
        "arguments are no JSON: add",
    ),
    "a deep record": (f'{{"request": {{"messages": {"[" * 9000}{"]" * 9000}}}}}', ""),
}


def test_bad_records_are_counted_with_their_place_and_the_rest_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [one if isinstance(one, str) else json.dumps(one) for one, _ in BAD.values()]
    source = tmp_path / "log.jsonl"
    source.write_text("\n".join([json.dumps(call(*FIRST)), *lines, json.dumps(call(*SECOND))]))
    assert main(["--source", str(source), "--out", str(tmp_path / "out")]) == 0
    assert [message["content"] for message in written(tmp_path / "out")[0]["messages"]] == ["Be brief.", *SECOND]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    dropped, left_out = (sum(one["count"] for one in report[name].values()) for name in ("dropped", "left_out"))
    assert dropped + left_out == len(BAD)
    told = capsys.readouterr().out
    firsts = [one["first"] for name in ("dropped", "left_out") for one in report[name].values()]
    assert len(firsts) >= 14 and all(first in told and "log.jsonl:" in first for first in firsts)
    assert sum(report[name] for name in ("records_used", "records_of_feedback")) + dropped == report["records"]
    named = [
        place
        for name in ("dropped", "left_out")
        for one in report[name].values()
        for place in (one["first"], *one.get("further", ()))
    ]
    assert {int(place.split("log.jsonl:")[1].split(":")[0]) for place in named} == {*range(2, len(BAD) + 2)}


@pytest.mark.parametrize("name", BAD)
def test_strict_refuses_the_first_and_writes_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, words = BAD[name]
    source = tmp_path / "log.jsonl"
    source.write_text(f"{json.dumps(call(*FIRST))}\n{bad if isinstance(bad, str) else json.dumps(bad)}\n")
    assert main(["--source", str(source), "--out", str(tmp_path / "out"), "--strict"]) == 2
    told = capsys.readouterr().err
    assert "log.jsonl:2: " in told and words in told and "leave out --strict" in told
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("begun", ["{", '{\n  "request": {', '{\n "a": {"b": 1},'])
def test_an_object_without_an_end_takes_no_line_with_it(tmp_path: Path, begun: str) -> None:
    lines = [json.dumps(call(f"q{number}", f"a{number}")) for number in range(4)]
    indented = json.dumps(call("q4", "a4"), indent=2)
    source = tmp_path / "log.jsonl"
    source.write_text("\n".join([lines[0], begun, *lines[1:], begun, indented, indented.replace("4", "5"), begun]))
    assert main(["--source", str(source), "--out", str(tmp_path / "out")]) == 0
    assert [text for text, _, _ in feedback(tmp_path)] == [f"a{number}" for number in range(6)]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (broken,) = report["dropped"].values()
    assert (broken["count"], report["records"]) == (3, 9)


def test_files_that_are_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for source in ("gone.jsonl", "empty"):
        assert main(["--source", str(tmp_path / source), "--out", str(tmp_path / "out")]) == 2
        assert source in capsys.readouterr().err
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(call(*FIRST)).encode() * 2)[:40])
    assert main(["--source", str(tmp_path / "cut.jsonl.gz"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert "no rows" in told.err and "cut" in told.out and not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (b"", "no record in it"),
        (b"\n\n", "no record in it"),
        (b"PAR1\x15\x04", "a parquet file"),
        (b"\x1f\x8b\x08", "whose name must end in .gz"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd"),
    ],
)
def test_a_file_of_another_kind_is_named(
    tmp_path: Path, begin: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.jsonl").write_bytes(begin)
    assert main(["--source", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert "log.jsonl: " in told.err and words in told.err and not told.out


def test_files_of_a_folder_that_are_passed_over_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").mkdir()
    for name in ("a.jsonl", "a.jsonl.1", "b.jsonl.zst"):
        write_lines(tmp_path / "log" / name, [call(*FIRST)])
    assert main(["--source", str(tmp_path / "log"), "--out", str(tmp_path / "out")]) == 0
    assert f"2 files whose names are no log's, the first {tmp_path / 'log' / 'a.jsonl.1'}" in capsys.readouterr().out


def test_a_log_of_calls_is_pointed_to_this_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "log.jsonl", [call(*FIRST)])
    assert tool_conversations(["--source", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "python -m data_prep.traces" in capsys.readouterr().out
    source = write_lines(tmp_path / "log.jsonl", [{**WHOLE, "feedback": 0, "finish_reason": "stop"}])
    assert tool_conversations(["--source", str(source), "--out", str(tmp_path / "out")]) == 0
    assert "a log (feedback, finish_reason) is read by python -m data_prep.traces" in capsys.readouterr().out


ADD = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLING = [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", **ADD}]}]
WHOLE: dict[str, Any] = {
    "messages": [
        SYSTEM,
        *CALLING,
        {"role": "tool", "tool_call_id": "x", "content": "2"},
        {**ANSWER, "annotations": [1]},
    ],
    "tools": [TOOL],
}
SHAREGPT: dict[str, Any] = {
    "system": "Be brief.",
    "tools": json.dumps([TOOL["function"]]),
    "conversations": [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "1"},
    ],
}


@pytest.mark.parametrize("form", [WHOLE, SHAREGPT, {**WHOLE, "messages": json.dumps(WHOLE["messages"])}])
def test_a_whole_conversation_is_learnt_with_all_of_its_answers(tmp_path: Path, form: dict[str, Any]) -> None:
    more = {"id": "c1", "created": 1_790_000_000, "model": "m", "feedback": "up", "comment": "to x@a.de"}
    assert rows(tmp_path, {**form, **more}) == [("c1", 0, "a  2 1")]
    (row,) = written(tmp_path / "out")
    assert [one["weight"] for one in row["messages"]] == [None] * 5 and json.loads(row["tools"]) == [TOOL]
    assert row["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (row["model"], row["feedback"], row["comment"]) == ("m", 1, "to [EMAIL_1]")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["calls"] == {"conversation": 2} and report["records_used"] == report["records"] == 1
    assert report["not_read"] == ({} if form is SHAREGPT else {"conversation: annotations": 1})


def test_marks_of_turns_in_a_whole_conversation(tmp_path: Path) -> None:
    said = [USER, {**ANSWER, "weight": 0}, {**USER, "content": "b"}, {"role": "assistant", "content": "2"}]
    assert rows(tmp_path, {"messages": said}) == [(ONE, 0, "a 1* b 2")]
    assert rows(tmp_path, {"messages": [{**ANSWER, "content": "Hello!"}, USER, ANSWER]}) == [(ONE, 0, "Hello!* a 1")]


def test_unreadable_feedback_leaves_its_call_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The call is learnt as one without feedback, so it is not counted as dropped."""
    for odd in ("meh", [1, 0], "5 stars", {"mood": "glad"}):
        log = [call(*FIRST, feedback=odd), {"messages": [USER, ANSWER], "score": 0}]
        rows(tmp_path, *log)
        assert feedback(tmp_path) == [("1", None, None), ("1", 0, None)]
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert not report["dropped"] and report["records_used"] == report["records"] == 2
        assert report["feedback"]["problems"]["feedback that is no number"]["count"] == 1
        assert (report["feedback"]["zero"], report["feedback"]["negative"]) == (1, 0)
        assert "log.jsonl:1: feedback that is no number" in capsys.readouterr().out
    source = write_lines(tmp_path / "log.jsonl", [call(*FIRST, feedback="meh")])
    assert main(["--source", str(source), "--out", str(tmp_path / "strict"), "--strict"]) == 2


def test_feedback_in_metadata_is_read_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A score there may be a search's, so only sure names are read. Others are named as not read."""
    log = [
        call(*FIRST, metadata={"rating": 5, "comment": "by a clerk"}),
        call("x", "y", metadata={"score": 0.7, "operating_system": "x"}, feedback_stats={"n": 1}),
        call("u", "v", metadata={"feedback": "meh"}),
    ]
    rows(tmp_path, *log)
    assert feedback(tmp_path) == [("1", 5, None), ("y", None, None), ("v", None, None)]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["not_read"] == {"score": 1, "feedback_stats": 1} and report["records_used"] == 3
    assert list(report["feedback"]["problems"]) == ["feedback that is no number"]
    assert "not read: feedback_stats, in 1 calls" in capsys.readouterr().out


def test_a_list_of_conversations(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps({"conversations": [{**WHOLE, "id": "x"}, {**WHOLE, "id": "y"}]}))
    assert main(["--source", str(tmp_path / "log.json"), "--out", str(tmp_path / "out")]) == 0
    assert [row["session"] for row in written(tmp_path / "out")] == ["x", "y"]


def feedback(tmp_path: Path) -> list[tuple[str, float | None, str | None]]:
    return [(row["messages"][-1]["content"], row["feedback"], row["comment"]) for row in written(tmp_path / "out")]


@pytest.mark.parametrize(
    ("given", "number"),
    [
        *((True, 1), (False, -1), (0.5, 0.5), ("up", 1), ("thumbs_down", -1), ("Good", 1), ("dislike", -1), ("3", 3)),
        *(
            ({"value": "", "thumbs": "down"}, -1),
            ({"value": -1}, -1),
            ({"type": "thumbs_up"}, 1),
            ({"thumb": "up"}, 1),
            ({"score": None}, None),
        ),
        *(({}, None), (None, None), ("", None)),
    ],
)
def test_feedback_of_a_call(tmp_path: Path, given: Any, number: float | None) -> None:
    for name in ("feedback", "score", "thumbs", "rating"):
        rows(tmp_path, call(*FIRST, **{name: given}))
        assert feedback(tmp_path) == [("1", number, None)]


def test_feedback_of_its_own(tmp_path: Path) -> None:
    """On an answer by its id it is about the branch where the answer was given; on a session about all of it."""
    log = [
        {"feedback": "down", "response_id": "r1", "comment": "rude"},
        call(*FIRST, id="r1", session="s"),
        call("a", "2", id="r2", session="s"),
        call("a", "2", "b", "3", id="r3", session="s"),
        {"rating": 1, "response_id": "r3", "request_id": "of the vote"},
        call("x", "y", session="t"),
        {"session": "t", "thumbs": "up"},
        {"session": "t", "comment": "fast"},
        call("u", "v", trace_id="w"),
        {"traceId": "w", "name": "user_feedback", "value": 1, "dataType": "NUMERIC"},
        {"traceId": "w", "name": "toxicity", "value": 0.01},
    ]
    rows(tmp_path, *log)
    assert feedback(tmp_path) == [("1", -1, "rude"), ("3", 1, None), ("y", 1, "fast"), ("v", 1, None)]
    report = json.loads((tmp_path / "out" / "report.json").read_text())["feedback"]
    assert (report["found"], report["positive"], report["negative"], report["comments"]) == (6, 3, 1, 2)
    assert list(report["problems"]) == ["a score of another name"]
    rows(tmp_path, *log, more=("--score", "toxicity"))
    assert feedback(tmp_path)[-1] == ("v", 0.01, None)


def test_feedback_that_says_nothing_sure_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = [
        call(*FIRST, id="r1", session="s", feedback=1),
        {"feedback": "down", "response_id": "r1"},
        call("q", "1", id="twice", session="t"),
        call("q", "2", id="twice", session="t"),
        {"feedback": 1, "call_id": "twice"},
        {"feedback": 1, "session": "nowhere"},
        {"feedback": 1},
        {"feedback": "soso", "session": "s"},
        {"feedback": 1, "score": -1, "session": "s"},
    ]
    rows(tmp_path, *log)
    assert feedback(tmp_path) == [("1", None, None), ("1", None, None), ("2", None, None)]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    problems = report["feedback"]["problems"]
    assert {name: one["count"] for name, one in problems.items()} == {
        "feedback that contradicts other feedback on the same branch": 2,
        "feedback on an id of several answers": 1,
        "feedback on what is not in the log": 1,
        "feedback without an id": 1,
    }
    assert list(report["dropped"]) == ["feedback that is no number", "feedback that contradicts itself in one record"]
    assert "log.jsonl:6" in capsys.readouterr().out


def test_lists_of_records(tmp_path: Path) -> None:
    """A trace of Langfuse's, with its scores; a page of an API."""
    generation = {
        "id": "g",
        "type": "GENERATION",
        "startTime": "2026-05-01T12:00:00Z",
        "input": QUESTION,
        "output": ANSWER,
    }
    score = {"name": "user_feedback", "value": 1, "observationId": "g", "comment": "fine"}
    trace: dict[str, Any] = {
        "id": "t",
        "sessionId": "s",
        "input": "a",
        "output": "1",
        "observations": [generation],
        "scores": [score],
    }
    trace["observations"] += [{"id": "x", "type": "TOOL", "input": {"a": 1}, "output": "2"}]
    assert rows(tmp_path, trace) == [("s", 0, "a 1")] and feedback(tmp_path) == [("1", 1, "fine")]
    assert rows(tmp_path, {"data": [generation, {**generation, "input": QUESTION, "output": "2"}], "meta": {}}) == [
        (ONE, 0, "a 1"),
        (ONE, 1, "a 2"),
    ]
    assert rows(tmp_path, {**generation, "scores": [score]}) == [(ONE, 0, "a 1")] and feedback(tmp_path)[0][1] == 1


def test_what_is_said_around_records_is_about_all_of_them(tmp_path: Path) -> None:
    """Thumbs and words, with the session or trace; the model; tools where records have no request."""
    flat = {"messages": QUESTION, **CHAT}
    log: list[dict[str, Any]] = [
        {"session_id": "s", "feedback": "down", "comment": "rude", "calls": [flat], "model": "m", "tools": [TOOL]},
        {"trace_id": "t", "metadata": {"rating": 5}, "calls": [call(*FIRST)], "system": "x", "tools": [TOOL]},
        {"session": "u", "data": [{"feedback": 1, "calls": [call("x", "y")], "star_rating": 2}]},
        {"feedback": 1, "calls": [call("p", "q")]},
        {"feedback": "meh", "session": "v", "calls": [call("q", "r")]},
    ]
    rows(tmp_path, *log)
    told = [("1", -1, "rude"), ("1", 5, None), ("y", 1, None), ("q", None, None), ("r", None, None)]
    assert feedback(tmp_path) == told
    first, second, *_ = written(tmp_path / "out")
    assert (first["model"], json.loads(first["tools"]), second["tools"]) == ("m", [TOOL], None)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["records"], report["records_used"], report["records_of_feedback"]) == (10, 5, 4)
    assert report["feedback"]["found"] == 4 and list(report["feedback"]["problems"]) == ["feedback without an id"]
    assert "expected a finite number" in report["dropped"]["feedback that is no number"]["first"]
    assert report["not_read"] == {"chat: tools beside the request": 1, "star_rating": 1, "system around records": 1}


def test_feedback_on_a_call_with_several_answers_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows which of them it is about."""
    several = call(*FIRST, feedback="up", comment="fine")
    several["response"]["choices"].append({"message": {**ANSWER, "content": "2"}, "finish_reason": "stop"})
    same = call("q", "1", feedback="up", id="x")
    same["response"]["choices"] *= 2
    rows(tmp_path, several, same)
    assert feedback(tmp_path) == [("1", None, None), ("2", None, None), ("1", 1, None)]
    line = f"feedback not used: 1, the first at {tmp_path}/log.jsonl:1: feedback on a call with several answers"
    assert line in capsys.readouterr().out


def test_texts_that_no_file_can_hold_and_deep_arguments(tmp_path: Path) -> None:
    deep = "[" * 400 + '"x@a.de"' + "]" * 400
    request = {
        "messages": QUESTION,
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
        ],
    }
    function = {"name": "f", "arguments": f'{{"a": {deep}}}'}
    answer = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    response = {"choices": [{"message": answer, "finish_reason": "tool_calls"}], "model": "m\ud800"}
    assert rows(tmp_path, {"request": request, "response": response, "session": "s\ud800", "comment": "c\ud800"})
    assert rows(tmp_path, call(*FIRST), call("a\ud800", "1"))[0][2] == "a 1"
    (row,) = written(tmp_path / "out")
    assert "a.de" not in json.dumps(row)


ATTRIBUTES: dict[str, Any] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "a"}]}]),
    "gen_ai.output.messages": [
        {"role": "assistant", "parts": [{"type": "text", "content": "1"}], "finish_reason": "stop"}
    ],
}
SAID_OF = {
    "gen_ai.evaluation.name": "thumbs",
    "gen_ai.evaluation.score.label": "down",
    "gen_ai.evaluation.explanation": "no",
}
EVENT = {"name": "gen_ai.evaluation.result", "attributes": SAID_OF}
SPAN = {"name": "chat", "context": {"trace_id": "0x1", "span_id": "0xA"}, "start_time": "2026-05-01T12:00:00Z"}
TOOL_SPAN = {**SPAN, "context": {"span_id": "0xB"}, "attributes": {"gen_ai.operation.name": "execute_tool"}}
NEWER = {
    **SPAN,
    "context": {"span_id": "0xC"},
    "attributes": {
        **ATTRIBUTES,
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "dream"}]}]),
    },
}
SPANS: list[dict[str, Any]] = [{**SPAN, "attributes": ATTRIBUTES, "events": [EVENT]}, TOOL_SPAN, NEWER]


def test_an_evaluation_of_a_span(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    records = SPANS
    path.write_text("\n".join(json.dumps(one, indent=4) for one in records))
    assert main(["--source", str(path), "--out", str(tmp_path / "out")]) == 0
    assert feedback(tmp_path) == [("1", -1, "no")]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (skipped,) = report["skipped"].values()
    line = len(json.dumps(records[0], indent=4).splitlines()) + 1
    assert skipped == {"count": 1, "first": f"{path}:{line}: no call of a model: a span execute_tool"}
    assert list(report["dropped"]) == ["a part of a message that is no text"]
