"""Calls of Phi-4-mini: a whole message that is `functools` and a list of calls, or calls as its template writes them.

The template writes an object in JSON whose arguments are as Python writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import literal_at
from agentrl.chat.formats.hermes import json_call
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

PREFIX = "functools"


def functools_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `functools[{"name": ..., "arguments": {...}}, ...]`, or such objects after commas."""
    text = body.strip().removeprefix(PREFIX).strip()
    text = text if text.startswith("[") else f"[{text}]"
    try:
        value, end = literal_at(text, 0)
        if text[end:].strip():
            raise ValueError(f"text after the list, at character {end}")
    except ValueError as fault:
        return [Found(error=f"the calls are no list of objects: {fault}")]
    return [json_call(item) for item in value] if isinstance(value, list) else []


def is_call(message: str) -> bool:
    """Say whether a whole message, which has no markers, is or tries to be a list of calls."""
    return message.startswith(PREFIX) or (message.startswith("{") and '"name"' in message)


FORMAT = CallFormat("", "", functools_body, is_call=is_call, begins=(PREFIX, "{"), signs=("functools[",))
