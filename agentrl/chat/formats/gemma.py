"""Calls of Gemma 4: `call:NAME{KEY:VALUE}`, keys without quotes and strings between tokens of their own.

FunctionGemma's have other marks, and text may stand for any value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from agentrl.chat.formats.arguments import LiteralBuilder, parameters_of, read_argument
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.chat.message import parse_json
from agentrl.system.json_value import JSON, as_object
from agentrl.tool import ToolSchema

QUOTE, ESCAPE = '<|"|>', "<escape>"


def escaped_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `call:NAME{KEY:<escape>VALUE<escape>,...}`, each text as the value that its schema takes."""
    (call,) = read_call(body, ESCAPE)
    root = parameters_of(str(call.name), tools)
    schemas, other = as_object(root.get("properties")), root.get("additionalProperties")
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    for key, value in arguments.items():
        if isinstance(value, str):
            arguments[key] = read_argument(value, schemas.get(key, other), root)
    return [call]


def read_call(body: str, quote: str) -> list[Found]:
    """Read `call:NAME{KEY:VALUE,...}`, strings between two `quote`."""
    head, brace, rest = body.strip().partition("{")
    if not (head.startswith("call:") and brace):
        return [Found(error="the call is not of the form call:name{key:value,...}")]
    name = head.removeprefix("call:").strip()
    try:
        return [Found(name, read_value(brace + rest, quote))]
    except ValueError as fault:
        return [Found(name, error=f"the arguments cannot be read: {fault}")]


@cache
def _token(quote: str) -> re.Pattern[str]:
    """Make the pattern of a mark, a string or anything else up to the next mark."""
    quote = re.escape(quote)
    return re.compile(rf"\s*+(?:([\[\]{{}}:,])|{quote}(.*?){quote}|([^\[\]{{}}:,]++))", re.DOTALL)


def read_value(text: str, quote: str) -> JSON:
    """Read an object, a list, a number, a word of JSON's, or a string between quotes. Raises ValueError for others."""
    builder = LiteralBuilder()
    at = 0
    while at < len(text):
        token = _token(quote).match(text, at)
        if token is None:
            raise ValueError(f"no value at character {at}")
        at = token.end()
        mark, string, bare = token.groups()
        if mark is not None:
            builder.mark(mark, at)
        elif string is not None:
            builder.add(string, at)
        else:
            builder.add(_bare(bare.strip(), quote, key=builder.expects_key), at)
    return builder.value()


def _bare(word: str, quote: str, *, key: bool) -> JSON:
    if quote in word:
        raise ValueError(f"{word[:64]!r} has a string in it")
    if key:
        return word
    try:
        value = parse_json(word)
    except ValueError:
        value = word
    if isinstance(value, str):
        raise ValueError(f"{word[:64]!r} is no number, true, false or null; a string stands between two {quote}")
    return value


FORMAT = CallFormat(
    "<|tool_call>",
    "<tool_call|>",
    lambda body, tools: read_call(body, QUOTE),
    tags=(QUOTE,),
    reasoning=("<|channel>thought\n", "<channel|>"),
    signs=("<|tool_call>", QUOTE),
    families=("gemma4",),
)
FUNCTION_GEMMA = CallFormat(
    "<start_function_call>",
    "<end_function_call>",
    escaped_body,
    tags=(ESCAPE,),
    signs=("<start_function_call>", ESCAPE),
)
