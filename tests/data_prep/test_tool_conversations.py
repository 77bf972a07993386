"""Conversations with tool calls: every form becomes one, what would teach something wrong stays out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_prep.tool_conversations import main
from tests.naming import assert_names

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": WEATHER}
ARGUMENTS = {"city": "Köln", "days": 2}


def call(arguments: Any = None, name: str = "weather", **more: Any) -> dict[str, Any]:
    arguments = ARGUMENTS if arguments is None else arguments
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def openai(*calls: Any, answers: int | None = None) -> dict[str, Any]:
    answers = len(calls) if answers is None else answers
    return {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Köln?"}]},
            {"role": "assistant", "content": None, "tool_calls": list(calls)},
            *({"role": "tool", "content": f"rain {index}"} for index in range(answers)),
            {"role": "assistant", "content": "Rain."},
        ],
        "tools": [TOOL],
    }


SHAREGPT = {
    "system": "Be brief.",
    "tools": json.dumps([WEATHER]),
    "conversations": [
        {"from": "human", "value": "Weather in Köln?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": ARGUMENTS})},
        {"from": "observation", "value": "rain 0"},
        {"from": "gpt", "value": "Rain."},
    ],
}
HERMES = {
    "conversations": [
        {"from": "system", "value": f"You call functions. <tools> {json.dumps([TOOL])} </tools> Use <tool_call>."},
        {"from": "human", "value": "Weather in Köln?"},
        {
            "from": "gpt",
            "value": f"<tool_call>\n{json.dumps({'arguments': ARGUMENTS, 'name': 'weather'})}\n</tool_call>\n"
            '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>',
        },
        {
            "from": "tool",
            "value": "<tool_response>\nrain 0\n</tool_response>\n<tool_response>sun</tool_response>",
        },
        {"from": "gpt", "value": "Rain."},
    ],
}
XLAM = {
    "id": 1,
    "query": "Weather in Köln?",
    "tools": json.dumps(
        [
            {
                "name": "weather",
                "description": "The weather of a city.",
                "parameters": {
                    "city": {"type": "str", "description": "Its name."},
                    "days": {"type": "int, optional", "description": "How many."},
                    "hours": {"type": "List[int]", "description": "Which.", "default": "[]"},
                    "thing": {"type": "Callable[[float], float]"},
                },
            }
        ]
    ),
    "answers": json.dumps([{"name": "weather", "arguments": {**ARGUMENTS, "thing": 1}}]),
}

PARAMETERS = {"type": "dict", "properties": {"q": {"type": "string"}, "n": {"type": "int"}}, "required": ["q"]}
CATALOGUE = [
    {"name": "Market Trends API", "description": "Trends.", "parameters": PARAMETERS, "required": None},
    {
        "name": "quote",
        "description": "A price.",
        "parameters": {"type": "dict", "properties": {"type": {"type": "list"}}},
    },
]
TOOLACE = {
    "system": "You are an expert in composing functions. Here is a list of functions in JSON format that you can "
    f"invoke:\n{json.dumps(CATALOGUE)}. \nShould you decide to return the function call(s). Put it in the format of "
    "[func1(params_name=params_value, params_name2=params_value2...), func2(params)]\n\nNO other text.",
    "conversations": [
        {"from": "user", "value": "Trends?"},
        {
            "from": "assistant",
            "value": '[Market Trends API(q="a (b), \\"c\\" [d]", n=3), quote(type=["x", true, None, {\'k\': -1.5}])]',
        },
        {"from": "tool", "value": '[{"name": "Market Trends API", "results": {"up": 1}}, {"name": "quote"}]'},
        {"from": "assistant", "value": "Up."},
    ],
}
EXCHANGE = {
    "name": "get_exchange_rate",
    "description": "Get the rate {between} two.",
    "parameters": {"type": "object", "properties": {"base": {"type": "string"}}, "required": ["base"]},
}
GLAIVE = {
    "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    f"{json.dumps(EXCHANGE, indent=4)}\n\n{json.dumps(WEATHER, indent=4)}\n",
    "chat": "USER: The rate of 1 O'USD?\n\n\nASSISTANT: <functioncall> "
    '{"name": "get_exchange_rate", "arguments": \'{"base": "O\\\'USD"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"rate": 0.85}\n\n\nASSISTANT: It is 0.85.\n\nUSER is not a turn here. <|endoftext|>\n\n\n'
    "USER: Thanks\n\n\nASSISTANT: Welcome! <|endoftext|>\n\n\n",
}


def made(tmp_path: Path, *records: Any, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    source = tmp_path / "conversations.jsonl"
    source.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    assert main(["--source", str(source), "--out", str(tmp_path), *options]) == 0
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "sft.parquet").to_pylist()
    return rows


def spoken(row: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Role, content, and the calls with their arguments, or the call that is answered."""
    return [
        (
            message["role"],
            message["content"],
            [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
            if message["tool_calls"]
            else message["tool_call_id"],
        )
        for message in row["messages"]
    ]


def test_every_form_becomes_the_same_conversation(tmp_path: Path) -> None:
    first, second, third, fourth = made(tmp_path, openai(call(json.dumps(ARGUMENTS), id="x")), SHAREGPT, HERMES, XLAM)
    expected: list[Any] = [
        ("system", "Be brief.", None),
        ("user", "Weather in Köln?", None),
        ("assistant", "", [("call00000", "weather", ARGUMENTS)]),
        ("tool", "rain 0", "call00000"),
        ("assistant", "Rain.", None),
    ]
    assert spoken(first) == expected and json.loads(first["tools"]) == [TOOL]
    assert spoken(second) == expected and json.loads(second["tools"]) == [TOOL]
    hermes = spoken(third)
    assert hermes[0] == expected[1] and json.loads(third["tools"]) == [TOOL]
    assert hermes[1][2] == [*expected[2][2], ("call00001", "weather", {"city": "Bonn"})]
    assert hermes[2:4] == [("tool", "rain 0", "call00000"), ("tool", "sun", "call00001")]
    assert spoken(fourth)[1] == ("assistant", "", [("call00000", "weather", {**ARGUMENTS, "thing": 1})])
    (tool,) = json.loads(fourth["tools"])
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name."},
            "days": {"type": "integer", "description": "How many."},
            "hours": {"type": "array", "description": "Which."},
            "thing": {},
        },
        "required": ["city", "thing"],
    }


def test_toolaces_calls_are_read_as_python_writes_them(tmp_path: Path) -> None:
    (row,) = made(tmp_path, TOOLACE)
    assert spoken(row) == [
        ("user", "Trends?", None),
        (
            "assistant",
            "",
            [
                ("call00000", "Market_Trends_API", {"q": 'a (b), "c" [d]', "n": 3}),
                ("call00001", "quote", {"type": ["x", True, None, {"k": -1.5}]}),
            ],
        ),
        ("tool", '{"name": "Market Trends API", "results": {"up": 1}}', "call00000"),
        ("tool", '{"name": "quote"}', "call00001"),
        ("assistant", "Up.", None),
    ]
    market, quote = (tool["function"] for tool in json.loads(row["tools"]))
    assert market["parameters"] == {
        "type": "object",
        "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["q"],
    }
    assert quote["parameters"]["properties"] == {"type": {"type": "array"}} and "required" not in market


def test_glaives_texts_are_taken_apart(tmp_path: Path) -> None:
    plain = {"system": "SYSTEM: You have no functions.", "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>"}
    first, second = made(tmp_path, GLAIVE, plain)
    assert spoken(first) == [
        ("user", "The rate of 1 O'USD?", None),
        ("assistant", "", [("call00000", "get_exchange_rate", {"base": "O'USD"})]),
        ("tool", '{"rate": 0.85}', "call00000"),
        ("assistant", "It is 0.85.\n\nUSER is not a turn here.", None),
        ("user", "Thanks", None),
        ("assistant", "Welcome!", None),
    ]
    assert [tool["function"] for tool in json.loads(first["tools"])] == [EXCHANGE, WEATHER]
    assert [one[:2] for one in spoken(second)] == [
        ("system", "You have no functions."),
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]


def test_answers_find_their_calls_by_id_else_by_order(tmp_path: Path) -> None:
    record = openai(call(id="a"), call({"city": "Bonn"}, id="b"))
    record["messages"][3]["tool_call_id"], record["messages"][4]["tool_call_id"] = "b", "a"
    (row,) = made(tmp_path, record)
    assert [message["tool_call_id"] for message in row["messages"][3:5]] == ["call00001", "call00000"]


def said(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


BAD: dict[str, Any] = {
    "a call of a tool that is not listed: 'wether'; listed: weather": openai(call(name="wether")),
    "arguments do not fit the tool's schema: weather: argument 'city' is missing": openai(call({"days": 2})),
    "arguments do not fit the tool's schema: weather: unknown argument 'town'": openai(call({**ARGUMENTS, "town": 1})),
    "arguments are no JSON: weather: '{'": openai(call("{")),
    'arguments are no JSON: weather: \'{"city": "Bonn", "city": "Rome"}\' (1 members of an object are given': openai(
        call('{"city": "Bonn", "city": "Rome"}')
    ),
    "arguments are no mapping: weather: [1]": openai(call([1])),
    "a call without a name": openai({"function": {}}),
    "a call is not answered: assistant after tool, expected tool": openai(call(), call(), answers=1),
    "a call is not answered: it is the end": {**openai(call()), "messages": openai(call())["messages"][:3]},
    "roles are out of order: tool after tool, expected assistant": openai(call(), answers=2),
    "roles are out of order: user after user": said(("user", "a"), ("user", "b")),
    "roles are out of order: assistant after the beginning": said(("assistant", "a")),
    "roles are out of order: critic": said(("user", "a"), ("critic", "b")),
    "it does not end with the assistant: but with user": said(("user", "a"), ("assistant", "b"), ("user", "c")),
    "expected a list of messages: `messages`, found []": said(),
    "an assistant's turn is empty": said(("user", "a"), ("assistant", " ")),
    "a content is no text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "a content is no text: [{'type': 'text', 'text': None}": said(
        ("user", "a"), ("assistant", [{"type": "text", "text": None}])
    ),
    "a tool's schema: tool_schema": {**openai(call()), "tools": [{"name": "the weather"}]},
    "expected a list of messages: `messages`, found ['hello']": {"messages": ["hello"]},
    "expected a list of messages, or one in JSON text": {**openai(call()), "tools": "weather"},
    "an answer to no call: tool_call_id 'y'": {
        **openai(call(id="x")),
        "messages": [
            *openai(call(id="x"))["messages"][:3],
            {"role": "tool", "content": "r", "tool_call_id": "y"},
            {"role": "assistant", "content": "b"},
        ],
    },
    "expected JSON: column conversations, turn 1, function_call, found \"[weather(city='K')]\" (Exp": {
        "conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "[weather(city='K')]"}]
    },
    "expected a JSON list with an answer to each of the 2 calls: turn 2, found 'up'": {
        **TOOLACE,
        "conversations": [*TOOLACE["conversations"][:2], {"from": "tool", "value": "up"}],
    },
    "expected arguments as in name=value: turn 1, found '__import__(1)'": {
        **TOOLACE,
        "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "[quote(__import__(1))]"}],
    },
    "expected arguments as in name=value: turn 1, found 'q=open(1)'": {
        **TOOLACE,
        "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "[quote(q=open(1))]"}],
    },
    "expected a call in JSON: turn 1, found": {**GLAIVE, "chat": "USER: a\n\nASSISTANT: <functioncall> {name: 1}"},
    "expected turns that begin with USER:, ASSISTANT: or FUNCTION RESPONSE:": {**GLAIVE, "chat": "Hello"},
    "expected functions in JSON, one after another: `system`, found": {"system": "use {x}", "chat": "USER: a"},
    "expected a known `from`": {"conversations": [{"from": "oracle", "value": "a"}]},
    "expected a list of messages: `answers`, found []": {**XLAM, "answers": "[]"},
    "unknown form: no messages, conversations, chat, nor query with answers, but question": {"question": "?"},
}


def test_what_is_bad_is_left_out_and_counted_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = made(tmp_path, *BAD.values(), SHAREGPT, *BAD.values())
    assert len(rows) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith(f"sft.parquet: 1 conversations, {2 * len(BAD)} left out")
    first = {reason.partition(":")[0]: number for number, reason in reversed(list(enumerate(BAD, start=1)))}
    for reason, count in (
        ("roles are out of order", 8),
        ("arguments do not fit the tool's schema", 4),
        ("a call without a name", 2),
    ):
        (line,) = (line for line in told if f": {reason}" in line)
        assert line.startswith(f"left out: {count}, the first at {tmp_path}/conversations.jsonl:{first[reason]}: ")
    counts = [int(line.split()[2].rstrip(",")) for line in told[1:]]
    assert sum(counts) == 2 * len(BAD) and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("reason", BAD)
def test_strict_refuses_the_file_naming_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    source = tmp_path / "c.jsonl"
    source.write_text(f"{json.dumps(SHAREGPT)}\n\n{json.dumps(BAD[reason])}\n")
    assert main(["--source", str(source), "--out", str(tmp_path / "out"), "--strict"]) == 2
    assert f"error: {source}:3: {reason}" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_without_a_good_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "c.json"
    source.write_text(json.dumps([said(("user", "a")), said(("user", "a"))], indent=1))
    assert main(["--source", str(source), "--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert_names(told.err, "no rows")
    assert_names(told.out, source)
