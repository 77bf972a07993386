"""Calls of Mistral: `[TOOL_CALLS]` and a JSON array of them."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.hermes import json_call
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.chat.message import parse_json
from agentrl.tool import ToolSchema


def json_list_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of calls."""
    try:
        value = parse_json(body.strip())
    except ValueError as fault:
        return [Found(error=f"the calls are not a valid JSON array: {fault}")]
    return [json_call(item) for item in (value if isinstance(value, list) else [value])]


FORMAT = CallFormat("[TOOL_CALLS]", "", json_list_body, signs=("[TOOL_CALLS]",))
