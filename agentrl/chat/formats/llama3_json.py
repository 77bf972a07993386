"""Calls in JSON without markers: a whole message that is an object with a name (Llama 3) or an array (xLAM).

Llama 3 may write a token before its object, Llama 4 markers before its objects. Nemotron Nano has the array in
`<TOOLCALL>`, Granite 3 after a marker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from agentrl.chat.formats.arguments import literal_at
from agentrl.chat.formats.hermes import as_json, json_body, json_call
from agentrl.chat.formats.mistral import json_list
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_BETWEEN = re.compile(r"\s*;\s*")


def object_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read an object, after Llama 3's token or alone, or several with `; ` between them, as servers' parsers do."""
    text, at, pieces = body.removeprefix(PYTHON_TAG).strip(), 0, list[str]()
    with suppress(ValueError):
        while separator := _BETWEEN.match(text, end := literal_at(text, at)[1]):
            pieces.append(text[at:end])
            at = separator.end()
    return [found for piece in (*pieces, text[at:]) for found in json_body(piece, tools)]


def array_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of calls."""
    return json_list(body)


def objects_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read objects one after the other, after Llama 4's two markers, between them, or alone."""
    before, _, after = body.partition(PYTHON_END)
    before = before.removeprefix(PYTHON_START).strip()
    if before and after.strip():
        return [Found(error=f"text before the calls: {before[:64]!r}")]
    text, at, found = before + after.rstrip(), 0, list[Found]()
    try:
        while at < len(text):
            value, at = literal_at(text, at)
            found.append(json_call(value))
    except ValueError as fault:
        return [Found(error=f"the calls are not valid JSON: {fault}")]
    return found


def is_call(message: str) -> bool:
    """Say whether a whole message, which has no markers, is or tries to be a call."""
    return message.removeprefix(PYTHON_TAG).lstrip().startswith("{") and '"name"' in message


def is_array(message: str) -> bool:
    """Say whether a whole message, which has no markers, is or tries to be a list of calls."""
    return message.startswith("[") and '"name"' in message


FORMAT = CallFormat(
    "",
    "",
    object_body,
    is_call=is_call,
    begins=("{", PYTHON_TAG),
    signs=("ipython", '"parameters"'),
    families=("llama-3",),
)
"""`ipython` is the role of tool answers, with any tokens around roles."""
LLAMA4 = CallFormat(
    "",
    "",
    objects_body,
    is_call=lambda message: message.startswith(("{", PYTHON_START)) and '"name"' in message,
    begins=("{", PYTHON_START),
    signs=("ipython", '"parameters"', PYTHON_START),
)
XLAM = CallFormat("", "", array_body, is_call=is_array, begins=("[",))
GRANITE = CallFormat(
    "<|tool_call|>",
    "",
    array_body,
    write=lambda calls: f"<|tool_call|>[{', '.join(map(as_json, calls))}]",
    signs=("<|tool_call|>",),
)
NEMOTRON_NANO = CallFormat("<TOOLCALL>", "</TOOLCALL>", array_body, signs=("<TOOLCALL>",))
