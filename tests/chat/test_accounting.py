"""Whatever a policy writes is in the text, the reasoning or the calls that are read, or a call has an error."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache

import pytest

from agentrl.chat import AssistantMessage, Chat
from agentrl.chat.codec import GUARD
from agentrl.chat.formats.parsers import CallFormat, CallParser
from agentrl.config.registries import CALL_FORMATS
from tests.chat.synthetic import CALLS, EVERY_TOKEN, NESTED, PLAIN, TOOLS, Calls, draw_arguments
from tests.chat.vocabularies import TINY
from tests.naming import Names, assert_names

EVERY = (*CALLS, NESTED)
ALL = pytest.mark.parametrize("calls", EVERY, ids=lambda calls: f"{calls.format}-{calls.head}-{calls.value}")
AROUND = ("{}", " {} ", '"{}"', ', "{}": 1', '"{}": 1, ', ",{}:1", "<{}>", '{}="{}"', "\n{}\n", "[{}]", "{{{}}}")
"""Ways to write a word that belongs to no call."""
JSON_PIECES = ('{"name": "search", ', '"arguments": ', "{", "}", '"', ",", ":", "\n", "[", "]", "functions.search:0")


def test_every_format_is_tried() -> None:
    registered = {name for name in CALL_FORMATS.names() if isinstance(CALL_FORMATS.get(name), CallFormat)}
    assert {calls.format for calls in EVERY} == registered


@cache
def parser_of(calls: Calls, tokens: tuple[str, ...], starts: bool = False) -> CallParser:
    format = CALL_FORMATS.get(calls.format)
    assert isinstance(format, CallFormat)
    return CallParser(TINY.codec(tokens), format, starts_in_reasoning=starts)


def parse(calls: Calls, text: str, tokens: tuple[str, ...] = EVERY_TOKEN, starts: bool = False) -> AssistantMessage:
    return parser_of(calls, tokens, starts).parse(TINY.codec(tokens).encode(text), TOOLS)


def what_is_read(message: AssistantMessage) -> str:
    """All that the reader of a turn is given: a broken call as it was written, a good one by its parts."""
    parts = [message.text, message.reasoning or ""]
    for call in message.calls:
        parts += [call.id, call.name, call.raw if call.error else json.dumps(call.arguments, ensure_ascii=False)]
    return "\n".join(parts)


def draw_turn(calls: Calls, source: random.Random) -> tuple[str, list[str]]:
    """A turn with words at any place, and the words: a good one that was damaged, or pieces in any order."""
    words = [f"Q{number}X" for number in range(source.randint(1, 4))]
    strays = [source.choice(AROUND).replace("{}", word).replace("{{", "{").replace("}}", "}") for word in words]
    given = [("search", draw_arguments(source, markup=False)) for _ in range(1 if calls.single else 2)]
    good = source.choice(("", f"{calls.think[0]}\nHm.\n{calls.think[1]}\n", "I say. ")) + calls.write(given)
    if source.random() < 0.5:
        places = sorted((source.randint(0, len(good)) for _ in strays), reverse=True)
        for at, stray in zip(places, strays, strict=True):
            good = good[:at] + stray + good[at:]
        return good, words
    format = CALL_FORMATS.get(calls.format)
    assert isinstance(format, CallFormat)
    at, end = sorted(source.sample(range(len(good) + 1), 2))
    pool = (*format.markers, *format.tags, *calls.think, *JSON_PIECES, *PLAIN, good, good[:at], good[at:end])
    pieces = [*strays, *(source.choice(pool) for _ in range(source.randint(0, 8)))]
    source.shuffle(pieces)
    return "".join(pieces), words


@ALL
@pytest.mark.parametrize("marked", [True, False])
def test_nothing_is_lost(calls: Calls, marked: bool) -> None:
    source = random.Random(f"{calls}{marked}")
    tokens = EVERY_TOKEN if marked else ("<|ended|>",)
    for _ in range(150):
        text, words = draw_turn(calls, source)
        message = parse(calls, text, tokens, source.random() < 0.2)
        read = what_is_read(message)
        assert all(word in read for word in words), (text, message)


def arguments(calls: Calls, *members: tuple[str, str, type]) -> str:
    """A call with arguments that are written as given: (name, value's text, type)."""
    if calls.value is None:
        inside = "{" + ", ".join(f'"{key}": {text}' for key, text, _ in members) + "}"
    else:
        inside = calls.comma.join(calls.parameter(*member) for member in members)
    return calls.group[0] + calls.call("search", inside) + calls.group[1]


@ALL
def test_an_argument_given_twice_is_an_error(calls: Calls) -> None:
    once, twice = (arguments(calls, *[("count", "1", int)] * count) for count in (1, 2))
    (call,) = parse(calls, once).calls
    assert (call.name, call.arguments) == ("search", {"count": 1})
    (call,) = parse(calls, twice).calls
    assert call.arguments is None and call.error and "twice" in call.error


@ALL
@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", '{"a": NaN}', '{"a": 1, "a": 1}', "[1e999]", "word", "1 2", "{"]
)
def test_what_is_no_json_is_an_error_or_the_text_itself(calls: Calls, text: str) -> None:
    """Formats whose values have no quotes give a text that is no value of its type to the check of the schema."""
    for key in ("tree", "ratio"):
        (call,) = parse(calls, arguments(calls, (key, text, float))).calls
        assert call.error or (calls.value and call.arguments == {key: text}), call


@ALL
def test_the_character_of_guards_is_replaced_where_a_policy_writes_it(calls: Calls) -> None:
    before, after = calls.write([("search", {"text": "aMARKb"})]).split("MARK")
    codec = TINY.codec(EVERY_TOKEN)
    ids = [*codec.encode(before), *codec._encode_whole(GUARD), *codec.encode(after)]
    (call,) = parser_of(calls, EVERY_TOKEN).parse(ids, TOOLS).calls
    assert call.arguments == {"text": "a\ufffdb"}


@ALL
def test_a_member_that_no_call_has_is_an_error(calls: Calls) -> None:
    text = calls.group[0] + calls.call("search", "{}" if calls.value is None else "") + calls.group[1]
    assert [call.error for call in parse(calls, text).calls] == [None]
    if '{"name"' in text:
        for other in ('"other": 1, ', '"Arguments": {}, ', '"name": "look_up", '):
            (call,) = parse(calls, text.replace('{"name"', f'{{{other}"name"')).calls
            assert call.error and call.arguments is None


@pytest.mark.parametrize(
    ("family", "text", "error"),
    [
        ("kimi-k2", "<|tool_call_begin|>calculator<|tool_call_end|>", "functions.name"),
        ("kimi-k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}", "not closed"),
        ("gemma4", "<|tool_call>calculator{}<tool_call|>", "call:name{key:value,...}"),
        ("gemma4", "<|tool_call>call:now{x:Paris}<tool_call|>", "'Paris'"),
        ("gemma4", '<|tool_call>call:now{x:"Paris"}<tool_call|>', "'\"Paris\"'"),
        ("gemma4", "<|tool_call>call:now{x:1,x:1}<tool_call|>", "twice"),
        ("gemma4", "<|tool_call>call:now{x:1}2<tool_call|>", "separator"),
        ("gemma4", "<|tool_call>call:now{" + "x:{" * 5000 + "<tool_call|>", "nested"),
        ("inkling", 'now<|content_invoke_tool_json|>{"name":"now"}<|end_message|>', "JSON"),
        (
            "inkling",
            'now<|content_invoke_tool_json|>{"name":"calculator","args":{}}<|end_message|>',
            ("'now'", "'calculator'"),
        ),
        ("inkling", 'now<|content_invoke_tool_json|>{"name":"now","args":{}}', "not closed"),
        ("inkling", "now<|content_invoke_tool_text|>{}<|end_message|>", "name<|content_invoke_tool_json|>"),
        ("llama-3", '{"name": "now", "parameters": {}, "other": 1}', "['other']"),
    ],
)
def test_broken_calls_of_families_say_why(make_chat: Callable[..., Chat], family: str, text: str, error: Names) -> None:
    chat = make_chat(family)
    (call,) = chat.parse([*chat._codec.encode(text), chat.stop_token_ids[0]], TOOLS).calls
    assert_names(call.error, error)
    assert call.error and call.arguments is None
    assert call.raw in text


def test_text_between_kimis_calls_is_kept(make_chat: Callable[..., Chat]) -> None:
    call = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = f"A<|tool_calls_section_begin|>B{call.format(0)}C{call.format(1)}D<|tool_calls_section_end|>E"
    chat = make_chat("kimi-k2")
    message = chat.parse(chat._codec.encode(text), TOOLS)
    assert message.text.split() == ["A", "B", "C", "D", "E"]
    assert [(call.id, call.name) for call in message.calls] == [("functions.now:0", "now"), ("functions.now:1", "now")]


def test_messages_of_inkling_are_read_behind_thinking_that_is_not_ended(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("inkling")
    call = 'now<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>'
    text = f"<|content_text|>A<|end_message|><|message_model|>{call}<|message_model|><|content_thinking|>B"
    message = chat.parse(chat._codec.encode(text), TOOLS)
    assert (message.text, message.reasoning, [call.name for call in message.calls]) == ("A", "B", ["now"])


def test_reasoning_that_a_later_prompt_began(make_chat: Callable[..., Chat]) -> None:
    """Gemma's prompt behind a tool's answer begins a thought, its first one does not."""
    chat = make_chat("gemma4")
    message = chat.parse(chat._codec.encode("I add.\n<channel|>Five."), TOOLS)
    assert (message.reasoning, message.text) == ("I add.", "Five.")
    message = chat.parse(chat._codec.encode("<|channel>thought\nI add.<channel|>Five."), TOOLS)
    assert (message.reasoning, message.text) == ("I add.", "Five.")
