"""Calls as Python writes them: `[name(key=value, ...), ...]`.

They are a whole message (Llama 4), stand between tokens (LFM2), or one a line (OLMo 3). Values are literals, read token
by token; nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.arguments import admits, literal_at, parameters_of, read_argument
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.system.json_value import JSON, as_object
from agentrl.tool import Schema, ToolSchema
from agentrl.trajectory import FunctionCall

_HEAD = re.compile(r"\s*+([^\W\d][\w.-]*+)\s*+\(\s*+")
_KEY = re.compile(r"\s*+([^\W\d]\w*+)\s*+=")
_COMMA = re.compile(r"\s*+,")
_LINE = re.compile(r"[^\S\n]*+\n")
_END = re.compile(r"\s*+\)")


def list_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `[name(key=value, ...), ...]`. A broken call makes an error of all."""
    text = body.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return [Found(error="the calls are not of the form [name(key=value, ...), ...]")]
    return _calls(text[1:-1].rstrip(), _COMMA, tools)


def lines_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read one `name(key=value, ...)` a line."""
    return _calls(body.strip(), _LINE, tools)


def is_call(message: str) -> bool:
    """Say whether a whole message, which has no markers, is or tries to be a list of calls."""
    return message.startswith("[") and _HEAD.match(message, 1) is not None


def _calls(text: str, separator: re.Pattern[str], tools: Sequence[ToolSchema]) -> list[Found]:
    found: list[Found] = []
    at = 0
    while True:
        head = _HEAD.match(text, at)
        if head is None:
            return [Found(error=f"no name and bracket of a call at character {at}")]
        try:
            arguments, at = _arguments(text, head.end(), parameters_of(head[1], tools))
        except ValueError as fault:
            return [Found(head[1], error=f"the calls cannot be read: {fault}")]
        found.append(Found(head[1], arguments))
        if at == len(text):
            return found
        between = separator.match(text, at)
        if between is None:
            return [Found(error=f"text after a call, at character {at}")]
        at = between.end()


def _arguments(text: str, at: int, root: Schema) -> tuple[dict[str, JSON], int]:
    """Read `key=value, ...)` from a character on, and find the end of it. Raises ValueError for anything else."""
    schemas, other = as_object(root.get("properties")), root.get("additionalProperties")
    arguments: dict[str, JSON] = {}
    while (end := _END.match(text, at)) is None or (arguments and text[at - 1] == ","):
        key = _KEY.match(text, at)
        if key is None:
            raise ValueError(f"no key=value at character {at}")
        if key[1] in arguments:
            raise ValueError(f"the argument {key[1][:64]!r} is given twice")
        value, at = literal_at(text, key.end())
        schema = schemas.get(key[1], other)
        # Some templates of Llama 4 put every value between quotes.
        if isinstance(value, str) and schema is not None and not admits(schema, value, root):
            value = read_argument(value, schema, root)
        arguments[key[1]] = value
        comma = _COMMA.match(text, at)
        if comma is None and _END.match(text, at) is None:
            raise ValueError(f"neither a comma nor a bracket at character {at}")
        at = at if comma is None else comma.end()
    return arguments, end.end()


def write_calls(calls: Sequence[FunctionCall]) -> str:
    """Write `[name(key=value, ...), ...]`; a malformed call with its text for arguments."""
    written = []
    for call in calls:
        given = call.get("arguments", {})
        text = given if isinstance(given, str) else ", ".join(f"{key}={value!r}" for key, value in given.items())
        written.append(f"{call['name']}({text})")
    return f"[{', '.join(written)}]"


FORMAT = CallFormat("", "", list_body, is_call=is_call, begins=("[",), write=write_calls)
LFM2 = CallFormat(
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    list_body,
    write=lambda calls: f"<|tool_call_start|>{write_calls(calls)}<|tool_call_end|>",
    signs=("List of tools: ",),
)
OLMO3 = CallFormat("<function_calls>", "</function_calls>", lines_body, signs=("<function_calls>",))
