"""What the policy wrote, read from its ids: calls in order, broken ones kept with the reason, in linear time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.chat import AssistantMessage, Chat
from agentrl.chat.formats import gemma, kimi_k3, minicpm, minimax_m3, muse, qwen3_coder
from agentrl.chat.formats.parsers import BodyParser, CallFormat, CallParser
from agentrl.config.registries import CALL_FORMATS
from agentrl.tool import ToolSchema
from tests.chat.conversations import TOOLS
from tests.chat.cost import cpu_seconds
from tests.chat.vocabularies import FAMILY_TOKENS
from tests.naming import Names, assert_names

GOOD = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'


def read(chat: Chat, text: str) -> AssistantMessage:
    """Parse `text` with its markers as the tokens they spell."""
    return chat.parse([*chat._codec.encode(text), chat.stop_token_ids[0]], TOOLS)


@pytest.mark.parametrize("name", ["hermes", "hermes_in_text", "qwen3"])
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "calculator", "arguments": {"expression": "2 + 3"}', ("JSON", "Expecting")),
        ("", ("JSON", "character 0", "Expecting")),
        ("calculator(2 + 3)", ("JSON", "character 0", "Expecting")),
        ('{"arguments": {}}', "no function name"),
        ('{"name": 5, "arguments": {}}', "no function name"),
        ('{"name": "calculator", "arguments": [1]}', ("JSON", "not list")),
        ('{"name": "calculator", "arguments": "{1}"}', ("JSON", "Expecting")),
        ('["calculator"]', ("JSON", "not list")),
        ('{"name": "calculator", "arguments": {"x": NaN}}', ("JSON", "NaN")),
        ('{"name": "calculator", "arguments": ' + "[" * 9000, ("JSON", "nested")),
        (
            '{"name": "calculator", "arguments": {"x": ' + "1" * 5000 + "}}",
            ("JSON", "Exceeds"),
        ),
    ],
)
def test_broken_json_calls_say_why(make_chat: Callable[..., Chat], name: str, body: str, error: Names) -> None:
    message = read(make_chat(name), f"Let me add.\n{GOOD}\n<tool_call>\n{body}\n</tool_call>")
    assert message.text == "Let me add."
    first, second = message.calls
    assert (first.name, first.arguments, first.error) == ("calculator", {"expression": "2 + 3"}, None)
    assert second.arguments is None
    assert_names(second.error, error)
    assert second.error is not None
    assert second.raw == body
    assert [call.id for call in message.calls] == ["call00000", "call00001"]


@pytest.mark.parametrize("name", ["hermes", "hermes_in_text", "qwen3", "coder", "glm-4.5"])
def test_unclosed_call(make_chat: Callable[..., Chat], name: str) -> None:
    message = read(make_chat(name), 'Hm.<tool_call>{"name": "calculator", "arguments": {}}')
    assert [(call.error, call.arguments) for call in message.calls] == [
        ("the call is not closed with </tool_call>", None)
    ]
    assert message.text == "Hm."


def test_arguments_as_json_text_and_none(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    text = '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"1\\"}"}</tool_call>'
    assert read(chat, text).calls[0].arguments == {"expression": "1"}
    assert read(chat, '<tool_call>{"name": "now"}</tool_call>').calls[0].arguments == {}
    assert read(chat, '<tool_call>{"name": "now", "arguments": null}</tool_call>').calls[0].arguments == {}


def test_text_around_calls_is_kept(make_chat: Callable[..., Chat]) -> None:
    message = read(make_chat("hermes"), f" First.\n{GOOD}\nThen\n{GOOD}\n#### 5")
    assert message.text == " First.\nThen\n#### 5"
    assert len(message.calls) == 2


def test_calls_inside_reasoning_are_drafts(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("qwen3")
    message = read(chat, f"<think>\nI could {GOOD} but no.\n</think>\n\nFive.")
    assert (message.text, message.calls) == ("Five.", ())
    assert message.reasoning == f"I could {GOOD} but no."
    # Reasoning that is never closed ends where a call begins; with no call, all of it is reasoning.
    message = read(chat, f"<think>\nI add.\n{GOOD}")
    assert (message.reasoning, len(message.calls)) == ("I add.", 1)
    message = read(chat, "<think>\nI wonder")
    assert (message.text, message.reasoning, message.calls) == ("", "I wonder", ())


def test_marker_spelled_with_other_tokens_is_text(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    ids = [*chat.encode(GOOD), chat.stop_token_ids[0]]
    assert chat.parse(ids, TOOLS) == AssistantMessage(GOOD)


def test_tagged_calls_take_types_from_the_schema(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("coder")
    text = (
        "<tool_call>\n<function=calculator>\n<parameter=expression>\n12\n</parameter>\n<parameter=digits>\n3\n</parameter>"
        "\n</function>\n</tool_call>"
    )
    assert read(chat, text).calls[0].arguments == {"expression": "12", "digits": 3}
    # What does not fit its type is left for the schema check to word.
    assert read(chat, text.replace("\n3\n", "\nthree\n")).calls[0].arguments == {"expression": "12", "digits": "three"}
    broken = read(chat, text.replace("</parameter>", "", 1).replace("</parameter>", "", 1)).calls[0]
    assert (broken.name, broken.error) == (
        "calculator",
        "a parameter is not of the form <parameter=name>value</parameter>",
    )
    bare = read(chat, "<tool_call>calculator</tool_call>").calls[0]
    assert_names(bare.error, "<function=name>")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (
            "coder",
            "<tool_call><function=calculator>{}<parameter=expression>\n1\n</parameter>{}</function>{}</tool_call>",
        ),
        ("coder", "<tool_call>{}<function=calculator><parameter=expression>\n1\n</parameter>\n{}\n{}</tool_call>"),
        ("glm-4.5", "<tool_call>calculator<arg_key>expression</arg_key>{}<arg_value>1</arg_value>{}\n{}</tool_call>"),
        (
            "minimax-m2",
            '<minimax:tool_call>{}<invoke name="calculator"><parameter name="expression">1</parameter>{}</invoke>{}'
            "</minimax:tool_call>",
        ),
    ],
)
def test_nothing_stands_between_parameters(make_chat: Callable[..., Chat], name: str, call: str) -> None:
    """Text there may be the rest of a value that holds a closing tag: the call would run with a part of it."""
    chat = make_chat(name)
    reasoning = "</think>" if name == "minimax-m2" else ""
    assert read(chat, reasoning + call.format("", " \n", "")).calls[0].arguments == {"expression": "1"}
    for at in range(3):
        stray = ["", "", ""]
        stray[at] = "y"
        found = read(chat, reasoning + call.format(*stray)).calls[0]
        assert found.arguments is None and found.error


UNCLOSED: dict[str, tuple[str, str]] = {
    "coder": (
        "<tool_call>\n<function=calculator>\n<parameter=expression>\n1\n{}<parameter=digits>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "</parameter>\n",
    ),
    "glm-4.5": (
        "<tool_call>calculator<arg_key>expression</arg_key><arg_value>1{}<arg_key>digits</arg_key><arg_value>3"
        "</arg_value></tool_call>",
        "</arg_value>",
    ),
    "minimax-m2": (
        '</think><minimax:tool_call><invoke name="calculator"><parameter name="expression">1{}'
        '<parameter name="digits">3</parameter></invoke></minimax:tool_call>',
        "</parameter>",
    ),
    "hy3": (
        "<tool_calls:opensource><tool_call:opensource>calculator<tool_sep:opensource>"
        "<arg_key:opensource>expression</arg_key:opensource><arg_value:opensource>1{}"
        "<arg_key:opensource>digits</arg_key:opensource><arg_value:opensource>3</arg_value:opensource>"
        "</tool_call:opensource></tool_calls:opensource>",
        "</arg_value:opensource>",
    ),
    "deepseek-v4": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="calculator"><｜DSML｜parameter name="expression" string="true">1{}'
        '<｜DSML｜parameter name="digits" string="false">3</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
        "</｜DSML｜parameter>",
    ),
    "gemma4": ('<|tool_call>call:calculator{{expression:<|"|>1{},digits:3}}<tool_call|>', '<|"|>'),
}
"""Calls of two arguments, without the close of the first one, and that close."""


@pytest.mark.parametrize("name", UNCLOSED)
def test_an_argument_that_is_not_closed_is_no_argument(make_chat: Callable[..., Chat], name: str) -> None:
    call, close = UNCLOSED[name]
    whole = read(make_chat(name), call.format(close)).calls[0]
    assert (whole.name, whole.arguments) == ("calculator", {"expression": "1", "digits": 3})
    found = read(make_chat(name), call.format(""))
    assert [one.arguments for one in found.calls] == [None] and found.calls[0].error


BODIES: dict[str, tuple[BodyParser, str, str]] = {
    "seed_oss": (qwen3_coder.SEED_OSS.body, "<function=f><parameter=x>1{}<parameter=y>2</parameter>", "</parameter>"),
    "minicpm": (minicpm.FORMAT.body, 'f"><param name="x">1{}<param name="y">2</param>', "</param>"),
    "muse": (
        muse.FORMAT.body,
        'f<|message|><atem:function_calls><atem:invoke name="f"><atem:parameter name="x">1{}'
        '<atem:parameter name="y">2</atem:parameter></atem:invoke></atem:function_calls>',
        "</atem:parameter>",
    ),
    "kimi_k3": (
        kimi_k3.FORMAT.body,
        'call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>1{}<|open|>argument key="y" '
        'type="number"<|sep|>2<|close|>argument<|sep|>',
        "<|close|>argument<|sep|>",
    ),
    "minimax_m3": (
        minimax_m3.FORMAT.body,
        ']<]minimax[>[<invoke name="f">]<]minimax[>[<x>1{}]<]minimax[>[<y>2]<]minimax[>[</y>]<]minimax[>[</invoke>',
        "]<]minimax[>[</x>",
    ),
    "function_gemma": (gemma.FUNCTION_GEMMA.body, "call:f{{x:<escape>1{},y:<escape>2<escape>}}", "<escape>"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_with_an_argument_that_is_not_closed(name: str) -> None:
    body, text, close = BODIES[name]
    (whole,), (found,) = body(text.format(close), ()), body(text.format(""), ())
    assert (whole.name, whole.arguments, whole.error) == ("f", {"x": 1, "y": 2}, None)
    assert found.error


def test_tags_in_a_quoted_text_stand_for_themselves() -> None:
    text = 'f"><param name="x"><![CDATA[a <param name="z">b</param> 3]]></param><param name="y">2</param>'
    (call,) = minicpm.FORMAT.body(text, ())
    assert (call.arguments, call.error) == ({"x": 'a <param name="z">b</param> 3', "y": 2}, None)
    assert minicpm.FORMAT.body(text.replace("]]>", ""), ())[0].error


def test_a_parameter_is_given_once(make_chat: Callable[..., Chat]) -> None:
    parameter = "<parameter=expression>\n{}\n</parameter>"
    text = f"<tool_call><function=calculator>{parameter.format(1)}{parameter.format(2)}</function></tool_call>"
    assert_names(read(make_chat("coder"), text).calls[0].error, "'expression'", "twice")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "[12]", "[12]"),
        ({"type": ["string", "number"]}, "12", 12),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, '["a"]', ["a"]),
        ({}, "12", 12),
        ({}, "Paris", "Paris"),
    ],
)
def test_unquoted_values(make_chat: Callable[..., Chat], schema: dict[str, Any], text: str, value: Any) -> None:
    tool: ToolSchema = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}},
    }
    for name, call in (
        ("coder", f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"),
        ("glm-4.5", f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
    ):
        chat = make_chat(name)
        assert chat.parse(chat._codec.encode(call), [tool]).calls[0].arguments == {"x": value}


def test_keyed_calls(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("glm-4.5")
    call = read(chat, "<tool_call>now</tool_call>").calls[0]
    assert (call.name, call.arguments) == ("now", {})
    call = read(chat, "<tool_call>calculator\n<arg_key>expression</arg_key>\n2 + 3</tool_call>").calls[0]
    assert_names(call.error, "<arg_key>name</arg_key><arg_value>value</arg_value>")
    assert_names(read(chat, "<tool_call>\n</tool_call>").calls[0].error, "no function name")


def test_minimax_block_with_several_calls(make_chat: Callable[..., Chat]) -> None:
    invoke = '<invoke name="calculator">\n<parameter name="expression">{}</parameter>\n</invoke>\n'
    text = f"plan</think>\n\n<minimax:tool_call>\n{invoke.format(1)}{invoke.format(2)}</minimax:tool_call>"
    message = read(make_chat("minimax-m2"), text)
    assert [call.arguments for call in message.calls] == [{"expression": "1"}, {"expression": "2"}]
    assert message.reasoning == "plan"
    unclosed = read(make_chat("minimax-m2"), text.replace("</invoke>\n</m", "</m"))
    assert [call.error is None for call in unclosed.calls] == [True, False]


def test_mistral_calls_keep_their_ids(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("mistral")
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}, {"name": "now", "arguments": {}}]'
    assert [(call.id, call.name) for call in read(chat, text).calls] == [("abcdefghi", "now"), ("call00001", "now")]
    assert_names(read(chat, '[TOOL_CALLS] [{"name"').calls[0].error, "JSON", "character 8", "Expecting")


def test_mistral_calls_with_arguments_behind_a_marker(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("mistral_args")
    text = (
        'Hm.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]calculator[CALL_ID]abcdefghi[ARGS]{"expression": "[ARGS] [TOOL_CALLS]"}'
    )
    message = read(chat, text.replace('"[ARGS] [TOOL_CALLS]"', '"1"'))
    assert [(call.id, call.name, call.arguments) for call in message.calls] == [
        ("call00000", "now", {}),
        ("abcdefghi", "calculator", {"expression": "1"}),
    ]
    assert message.text == "Hm."
    # Spelled with other tokens, a marker is text.
    ids = chat._codec.encode("[TOOL_CALLS]calculator[ARGS]") + chat.encode('{"expression": "[ARGS] [TOOL_CALLS]"}')
    assert chat.parse(ids, TOOLS).calls[0].arguments == {"expression": "[ARGS] [TOOL_CALLS]"}
    broken = [read(chat, f"[TOOL_CALLS]{body}").calls[0].error for body in ("now", "now[ARGS]{", "[ARGS]{}", "[{]")]
    assert broken[0] == "the call is neither a JSON array nor of the form name[ARGS]{...}"
    assert all(broken)


@pytest.mark.parametrize("name", ["llama-3", "llama"])
def test_llama_calls_are_whole_messages(make_chat: Callable[..., Chat], name: str) -> None:
    chat = make_chat(name)
    call = read(chat, '{"name": "calculator", "parameters": {"expression": "1"}}').calls[0]
    assert (call.name, call.arguments, call.error) == ("calculator", {"expression": "1"}, None)
    broken = read(chat, '{"name": "calculator", "parameters": {"expression"')
    assert_names(broken.calls[0].error, "JSON", "is not")
    assert broken.calls[0].error is not None
    assert broken.text == ""
    assert read(chat, '{"answer": 5}').calls == ()
    assert chat.parse(chat.encode('{"name": "x"')).calls == ()  # No tools, no calls.


def test_deepseek_calls(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("deepseek-v3")
    format = CALL_FORMATS.get("deepseek_v3")
    assert isinstance(format, CallFormat)
    parser = CallParser(chat._codec, format, starts_in_reasoning=False)
    begin, end = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    for body, wanted in (
        (
            'function<｜tool▁sep｜>calculator\n```json\n{"expression": "1"}\n```',
            ("calculator", {"expression": "1"}, None),
        ),
        ("function<｜tool▁sep｜>now\n```json\n```", ("now", {}, None)),
        ("calculator", ("", None, "the call has no <｜tool▁sep｜>")),
        ('calculator<｜tool▁sep｜>{"expression": "1\\n2"}', ("calculator", {"expression": "1\n2"}, None)),
        ('calculator<｜tool▁sep｜>{\n"expression": "1"\n}', ("calculator", {"expression": "1"}, None)),
        ("function<｜tool▁sep｜>{}", ("function", {}, None)),
    ):
        message = parser.parse(chat._codec.encode(f"Hm.{begin}{body}{end}"), TOOLS)
        assert [(call.name, call.arguments, call.error) for call in message.calls] == [wanted]
        assert message.text == "Hm."


def test_malformed_call_as_message(make_chat: Callable[..., Chat]) -> None:
    message = read(make_chat("hermes"), "<tool_call>{oops</tool_call>").to_message()
    function = {"name": "", "arguments": "{oops"}
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


MARKED = {
    **dict.fromkeys(("qwen3", "qwen3.5", "glm-4.5", "glm-5.1", "nemotron-3", "laguna-xs.2"), "<tool_call>"),
    **dict.fromkeys(("hermes", "hermes_in_text", "coder", "header_ends_turn"), "<tool_call>"),
    "minimax-m2": "<minimax:tool_call>",
    "deepseek-v3": "<｜tool▁call▁begin｜>",
    "kimi-k2": "<|tool_call_begin|>",
    "deepseek-v4": "<｜DSML｜invoke",
    "hy3": "<tool_call:opensource>",
    "gemma4": "<|tool_call>",
    "inkling": "<|content_invoke_tool_json|>",
    "mistral": "[TOOL_CALLS]",
    "harmony": "<|start|>assistant to=functions.now<|channel|>commentary<|message|>",
}


@pytest.mark.parametrize("name", MARKED)
def test_unclosed_openers_parse_in_linear_time(make_chat: Callable[..., Chat], name: str) -> None:
    chat = make_chat(name)
    opener = chat._codec.encode(MARKED[name])
    few, many = (parse_seconds(chat, opener * count) for count in (2_000, 40_000))
    assert many < 0.1 + 100 * few


@pytest.mark.parametrize("name", ["qwen3.5", "minimax-m2", "laguna-xs.2", "coder", "glm-4.5"])
@pytest.mark.parametrize(
    "tag", ["<parameter=a>", '<parameter name="a">', '<invoke name="x">', "<arg_key>a", "<function="]
)
def test_unclosed_tags_in_a_closed_call_parse_in_linear_time(
    make_chat: Callable[..., Chat], name: str, tag: str
) -> None:
    chat = make_chat(name)
    opener = "<minimax:tool_call>" if name == "minimax-m2" else "<tool_call>"
    head = '<invoke name="f">' if name == "minimax-m2" else "<function=f>"
    begin, piece, end = (chat._codec.encode(text) for text in (opener + head, tag, opener.replace("<", "</")))
    few, many = (parse_seconds(chat, begin + piece * count + end) for count in (200, 4_000))
    assert many < 0.1 + 100 * few


@pytest.mark.slice(2, "hostile")
@pytest.mark.parametrize("name", [*FAMILY_TOKENS, "hermes", "coder", "harmony", "mistral_args", "header_ends_turn"])
def test_a_million_ids_of_rubbish(make_chat: Callable[..., Chat], name: str) -> None:
    """Parsing takes at most ten times as long as decoding, and twenty times the ids at most a hundred times as long."""
    chat = make_chat(name)
    random_ = random.Random(name)
    texts = [chat.encode(text) for text in ("\n", "a", '{"a":', "[", "<")]
    markers = [[id] for id in chat._codec.added.values()]
    rubbish = [id for _ in range(1_000_000) for id in random_.choice(markers + texts)][:1_000_000]
    assert parse_seconds(chat, rubbish) < 10 * cpu_seconds(lambda: chat.decode(rubbish))
    for _ in range(20):
        start, piece = random_.choice(markers), random_.choice(markers + texts)
        few, many = ([*start, *(piece * count)[:count]] for count in (2_000, 40_000))
        assert parse_seconds(chat, many) < 0.1 + 100 * parse_seconds(chat, few)


def parse_seconds(chat: Chat, ids: list[int]) -> float:
    return cpu_seconds(lambda: chat.parse(ids, TOOLS))


@pytest.mark.slice(8, "hostile")
@pytest.mark.parametrize("name", [*FAMILY_TOKENS, "hermes", "coder", "harmony", "mistral", "llama", "header_ends_turn"])
def test_nothing_that_a_policy_samples_raises(make_chat: Callable[..., Chat], name: str) -> None:
    chat = make_chat(name)
    random_ = random.Random(name)
    texts = [
        *('{"name": "calculator", "arguments": {"expression": "1"}}', '{"name": {"a": 1}, "parameters": 3}', "[1]"),
        *("calculator", "\n", "function", "```json\n{}\n```", "<function=calculator>", "<parameter=expression>"),
        *("</parameter>", '<invoke name="calculator">', "</invoke>", "functions.calculator:0", "call:calculator{", "}"),
        *("<think>", "</think>", "1" * 5000, "[" * 9000, "NaN"),
    ]
    pool = [[id] for id in chat._codec.added.values()] * 2 + [chat.encode(text) for text in texts]
    for _ in range(150):
        ids = [id for _ in range(random_.randint(0, 12)) for id in random_.choice(pool)]
        for tools in (None, TOOLS):
            message = chat.parse(ids, tools)
            assert all((call.error is None) == (call.arguments is not None) for call in message.calls)
            assert all(isinstance(call.name, str) for call in message.calls)
            assert message.to_message()["role"] == "assistant"


@pytest.mark.parametrize("name", ["qwen3", "hermes"])
@pytest.mark.parametrize(("end", "names"), [("</think>", ["b"]), ("", ["a", "b"])])
def test_a_call_in_a_later_block_of_reasoning_does_not_run(
    make_chat: Callable[..., Chat], name: str, end: str, names: list[str]
) -> None:
    """As none in the first block runs. A block that is never closed ends at its first call."""
    chat = make_chat(name)
    made = '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
    meant = made.replace('"b"', '"a"')
    text = f"<think>\nx\n</think>\n\nI begin.<think>perhaps {meant}{end}{made}"
    message = read(chat, text)
    assert [call.name for call in message.calls] == names and message.reasoning == "x"
    assert ("perhaps" in message.text) and ('"a"' in message.text) == bool(end)
