"""Arguments without quotes: read by their schema, and what a template writes of them comes back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import Chat
from agentrl.chat.check import sample_arguments, start_up_check
from agentrl.chat.formats.arguments import NO_VALUE, admits, read_argument, read_literal
from agentrl.errors import ConfigError
from agentrl.tool import Schema, ToolSchema
from agentrl.tool.arguments import ArgumentCheck
from agentrl.trajectory import Message, ToolCall
from tests.chat import templates
from tests.chat.conversations import assistant, conversation, sampled_turns
from tests.chat.cost import cpu_seconds
from tests.chat.vocabularies import FAMILY_TOKENS, GLM, MINIMAX, QWEN, save_tokenizer
from tests.naming import naming

OWN = {
    "coder": (templates.CODER, QWEN, "<|im_end|>"),
    "coder_mixed": (templates.CODER_MIXED, QWEN, "<|im_end|>"),
    "coder_python": (templates.CODER_PYTHON, QWEN, "<|im_end|>"),
    "minimax": (templates.MINIMAX, (*QWEN, *MINIMAX), "<|im_end|>"),
    "glm": (templates.HEADER_ENDS_TURN, GLM, "<|endoftext|>"),
    "glm_python": (templates.HEADER_ENDS_TURN.replace("value | tojson", "value | string"), GLM, "<|endoftext|>"),
}
FAMILIES = (
    *("prime-qwen3", "qwen3.5", "nemotron-3", "glm-4.5", "glm-5.3", "minimax-m2", "laguna-xs.2", "laguna-s-2.1"),
    *("deepseek-v4", "hy3"),
)
"""Of each way to write calls as tags, one or two."""
DEFINITIONS: dict[str, Any] = {"Level": {"enum": ["low", "True", "3"]}, "Tree": {"type": "object", "properties": {}}}
DEFINITIONS["Tree"]["properties"] = {"flag": {"type": "boolean"}, "next": {"$ref": "#/$defs/Tree"}}


@pytest.fixture(scope="module")
def chat_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Chat]:
    made: dict[str, Chat] = {}

    def make(name: str) -> Chat:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            template, tokens, eos = OWN[name] if name in OWN else (None, *FAMILY_TOKENS[name])
            format = {"minimax": "minimax", "glm": "glm", "glm_python": "glm"}.get(name, "auto")
            saved = save_tokenizer(path, tokens, eos, template)
            made[name] = Chat.from_pretrained(saved, format=format if name in OWN else name)
        return made[name]

    return make


def tool_of(properties: dict[str, Any]) -> ToolSchema:
    parameters: Schema = {"type": "object", "properties": properties, "$defs": DEFINITIONS}
    return {"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}


def read_back(chat: Chat, tool: ToolSchema, arguments: dict[str, Any]) -> Any:
    """The arguments of the call that the template writes."""
    call: ToolCall = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for reasoning in (None, "r"):
        try:
            turn: Message = {**assistant("", 0, reasoning), "tool_calls": [call]}
            ids, mask = chat.render_training(conversation(turn), [tool])
        except ConfigError:
            continue
        calls = chat.parse(sampled_turns(ids, mask)[0], [tool]).calls
        broken = [call.error for call in calls if call.error is not None or call.name != "f"]
        (parsed,) = calls[:1] if broken else calls
        return broken[0] if broken else parsed.arguments
    raise AssertionError("the call cannot be written")


TEXT = st.one_of(
    st.sampled_from(["True", "false", "None", "null", "42", "1.5", "[1]", '{"a": 1}', "'x'", '"x"', "", "it's"]),
    st.text(alphabet="aT1 \n'\"\\[]{}:,é", max_size=6),
)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
INTEGER = st.integers(-(10**20), 10**20)
JSON_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGER, NUMBER, TEXT, st.sampled_from(["</tool_call>", "<|im_end|>"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
TYPED: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({"type": "string"}, TEXT),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "integer"}, INTEGER),
    ({"type": "number"}, st.one_of(NUMBER, INTEGER)),
    ({"type": "array"}, st.lists(JSON_VALUE, max_size=3)),
    ({"type": "object"}, st.dictionaries(TEXT, JSON_VALUE, max_size=3)),
    ({"type": ["integer", "null"]}, st.one_of(st.none(), INTEGER)),
    ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, st.one_of(st.none(), st.booleans())),
    ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/Tree"}]}, st.just({"flag": True, "next": {"flag": False}})),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, st.one_of(st.none(), st.sampled_from(["a", "42", "True"]))),
    ({"allOf": [{"$ref": "#/$defs/Level"}]}, st.sampled_from(["low", "True", "3"])),
    ({"enum": ["true", 1, False, None]}, st.sampled_from(["true", 1, False, None])),
    ({"const": True}, st.just(True)),
]
PROPERTIES = {f"p{index}": schema for index, (schema, _) in enumerate(TYPED)}
VALUES = st.fixed_dictionaries({}, optional={f"p{index}": values for index, (_, values) in enumerate(TYPED)})


@pytest.mark.parametrize("name", [*OWN, *FAMILIES])
@settings(max_examples=15, deadline=None)
@given(arguments=VALUES)
def test_what_a_template_writes_is_read_back(
    chat_of: Callable[[str], Chat], name: str, arguments: dict[str, Any]
) -> None:
    got = read_back(chat_of(name), tool_of(PROPERTIES), arguments)
    assert json.dumps(got, sort_keys=True) == json.dumps(arguments, sort_keys=True)  # True is not 1 there.


SPELLED = st.lists(
    st.sampled_from(
        [
            *("</parameter>", "<parameter=new>", "</function>", "<function=g>", "</tool_call>", "<tool_call>"),
            *('<parameter name="new">', '<invoke name="g">', "</invoke>", "<arg_key>", "</arg_key>new"),
            *("<arg_value>", "</arg_value>", "\n", " ", "x", "</think>", "<think>", "｜DSML｜", '"', "\\"),
        ]
    ),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("name", [*OWN, *FAMILIES])
@settings(max_examples=25, deadline=None)
@given(first=SPELLED, second=SPELLED)
def test_a_value_that_spells_tags_comes_back_whole_or_is_an_error(
    chat_of: Callable[[str], Chat], name: str, first: str, second: str
) -> None:
    """A value that spells a whole further parameter is one, which the schema's check refuses."""
    tool = tool_of({"p": {"type": "string"}, "q": {"type": "string"}})
    arguments = {"p": first, "q": second}
    got = read_back(chat_of(name), tool, arguments)
    if isinstance(got, dict) and got != arguments:
        assert ArgumentCheck(tool)(got) is not None


def test_markers_in_values_that_are_written_as_python_does(chat_of: Callable[[str], Chat]) -> None:
    """Their spelling is kept apart from the tokens by a character that `repr` escapes."""
    arguments = {"p5": {"</tool_call>": ["<|im_end|>", None, "\\ufdd1"]}}
    assert read_back(chat_of("coder_python"), tool_of(PROPERTIES), arguments) == arguments
    literal = {"p0": "\\ufdd0"}
    assert read_back(chat_of("coder_python"), tool_of(PROPERTIES), literal) == literal


@given(value=JSON_VALUE)
def test_literals_are_json_or_python(value: Any) -> None:
    wanted = NO_VALUE if isinstance(value, str) else value
    for text in (repr(value), json.dumps(value)):
        if wanted is not NO_VALUE:
            assert json.dumps(read_literal(text)) == json.dumps(wanted)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "'x'", "(1, 2)", "{1: 2}", "{'a'}", "[1,]", "[,1]", "[1 2]", "{'a' 1}", "{'a', 'b'}", "{'a': 1: 2}"),
        *("{'a': }", "[True", "[True]]", "[True}", "['a]", "[f()]", "[__import__('os')]", "[True] x", "[1_0, None]"),
        *("NaN", "inf", "1e999", "[None, 1e999]", "[None, " + "1" * 5000 + "]", "'a' 'b'", "[None]['a']"),
        *('"\\ud800"', '["\\uDFFF"]', '{"\\udead": 1}', '["\\ud83d \\ude00"]'),
        *("[None, '\\U00110000']", "[" * 100 + "None" + "]" * 100, "{[None]: 1}", "1.2.3", "--1", "True False"),
    ],
)
def test_no_literals(text: str) -> None:
    assert read_literal(text) is NO_VALUE


PIECES = (*"[]{}:,'\"\\ nU", "\\UFFFFFFFF", "\\ud800", "\\x41", "1e999", "True", "{'a': '")


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_no_text_raises_and_every_value_can_be_sent(pieces: list[str]) -> None:
    for text in ("".join(pieces), f"['{''.join(pieces)}']"):
        value = read_literal(text)
        if value is not NO_VALUE:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def test_escapes_of_python() -> None:
    assert read_literal(r'["\ud83d\ude00", "\\ud800"]') == ["😀", r"\ud800"]
    assert read_literal(r"['\x41\u00e9\U0001f600\n\\\'', None, true]") == ["Aé😀\n\\'", None, True]
    assert read_literal("[" * 99 + "None" + "]" * 99) is not NO_VALUE


@pytest.mark.parametrize(
    "piece", ["[", "{'a':", "'", "['", "\\", "['\\", '"\\', "[None,", "[1", "[-", "{'a': 'b', ", "True", "1", " "]
)
def test_reading_takes_linear_time(piece: str) -> None:
    for around in ("", "[]"):
        seconds = []
        for count in (10_000, 200_000):
            text = around[:1] + piece * count + around[1:]
            seconds.append(cpu_seconds(partial(read_literal, text)))
        assert seconds[1] < 0.1 + 100 * seconds[0]


CHOICES: dict[str, Any] = {"enum": ["1", 2, None, "auto"]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, " true\n", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "boolean"}, "TRUE", "TRUE"),
        ({"type": "string"}, "True", "True"),
        ({"type": "string"}, "None", "None"),
        ({"type": "string", "nullable": True}, "None", "None"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"type": ["string", "array"]}, "[1]", [1]),
        ({"type": "null"}, "None", None),
        ({"type": "integer"}, "3.0", 3.0),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "True", "True"),
        ({"type": "integer"}, "[3]", "[3]"),
        ({"type": "integer"}, '"3"', '"3"'),
        ({"type": "integer", "minimum": 5}, "3", 3),
        ({"type": "number"}, "1e-07", 1e-07),
        ({"type": "object"}, "{'a': {'b': [True, None, 'c']}}", {"a": {"b": [True, None, "c"]}}),
        ({"type": "object"}, "{'a': __import__('os')}", "{'a': __import__('os')}"),
        ({"type": "array"}, "(1, 2)", "(1, 2)"),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, "[None]", [None]),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, "{}", "{}"),
        ({"oneOf": [{"const": True}, {"const": "maybe"}]}, "True", True),
        ({"oneOf": [{"const": 1}, {"const": "maybe"}]}, "True", "True"),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["string"]}]}, "3", "3"),
        ({"$ref": "#/$defs/Level"}, "True", "True"),
        ({"$ref": "#/$defs/Tree"}, "{'flag': True}", {"flag": True}),
        ({"$ref": "#/$defs/Missing"}, "3", 3),
        ({"$ref": "#/$defs/Loop"}, "3", 3),
        (CHOICES, "1", "1"),
        (CHOICES, "2", 2),
        (CHOICES, "None", None),
        (CHOICES, "auto", "auto"),
        (CHOICES, "3", "3"),
        ({}, "True", True),
        ({}, '"x"', '"x"'),
        (True, "None", None),
        (False, "3", "3"),
        (None, "{'a': 1}", {"a": 1}),
    ],
)
def test_values_are_read_by_their_schema(schema: Any, text: str, value: Any) -> None:
    root: Schema = {"$defs": {**DEFINITIONS, "Loop": {"$ref": "#/$defs/Loop"}}}
    got = read_argument(text, schema, root)
    assert (got, type(got)) == (value, type(value))


def test_what_does_not_fit_is_told_as_it_was_written(chat_of: Callable[[str], Chat]) -> None:
    chat, tool = chat_of("coder_mixed"), tool_of({"flag": {"type": "boolean"}, "n": {"type": "integer"}})
    text = (
        "<tool_call>\n<function=f>\n<parameter=flag>\nyes\n</parameter>\n<parameter=n>\n[1]\n</parameter>\n</function>"
    )
    (call,) = chat.parse(chat._codec.encode(text + "\n</tool_call>"), [tool]).calls
    assert call.arguments is not None
    assert (
        ArgumentCheck(tool)(call.arguments) == 'flag: "yes" is not of type "boolean"; n: "[1]" is not of type "integer"'
    )


def test_parameters_without_a_name_of_their_own(chat_of: Callable[[str], Chat]) -> None:
    tool = tool_of({})
    tool["function"]["parameters"]["additionalProperties"] = {"type": "boolean"}
    assert read_back(chat_of("coder_mixed"), tool, {"any": True, "other": False}) == {"any": True, "other": False}


RICH = tool_of(
    {
        **PROPERTIES,
        "nested": {"type": "object", "properties": {"flags": {"type": "array", "items": {"type": "boolean"}}}},
    }
)


def test_sample_arguments_exercise_every_type() -> None:
    first, last = sample_arguments(RICH)
    assert ArgumentCheck(RICH)(first) is None
    assert ArgumentCheck(RICH)(last) is None
    assert (first["p1"], last["p1"], first["p6"], last["p6"]) == (True, False, 3, None)
    assert first["nested"] == {"flags": [True, True]}
    assert last["p11"] is None
    assert sample_arguments(tool_of({})) == [{}]


@pytest.mark.parametrize("name", [*OWN, *FAMILIES, "gemma4", "llama-3", "kimi-k2"])
def test_the_start_up_check_passes(chat_of: Callable[[str], Chat], name: str) -> None:
    start_up_check(chat_of(name), [{"role": "user", "content": "u"}], [RICH])


def test_the_start_up_check_finds_values_that_do_not_come_back(tmp_path: Path) -> None:
    shouting = templates.CODER_MIXED.replace("else value | string", "else value | string | upper")
    chat = Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", shouting))
    question: list[Message] = [{"role": "user", "content": "u"}]
    start_up_check(chat, question, [tool_of({"n": {"type": "integer"}})])
    with naming(ConfigError, "template", "parser"):
        start_up_check(chat, question, [tool_of({"n": {"type": "integer"}, "flag": {"type": "boolean"}})])


def test_numbers_beyond_the_interpreters_limit_stay_text() -> None:
    digits = "1" * (sys.get_int_max_str_digits() + 1)
    assert read_argument(digits, {"type": "integer"}, {}) == digits


def test_a_schema_that_multiplies_is_asked_once() -> None:
    """A client's tool may have it: each of 60 definitions names the next one twice."""
    root: Schema = {f"d{number}": {"allOf": [{"$ref": f"#/d{number + 1}"} for _ in "ab"]} for number in range(60)}
    root["d60"] = {"anyOf": [{"type": "string"}, {"$ref": "#/d0"}]}
    root["d61"] = {"$ref": "#/d61", "type": "integer"}
    assert admits({"$ref": "#/d0"}, "x", root) and admits(root["d61"], 1, root) and not admits(root["d61"], "x", root)
