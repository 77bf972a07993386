"""Calls of Jamba, Hunyuan A13B, Apriel and MiniMax M1: a JSON array in `<tool_calls>`, or JSON objects line by line."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.hermes import json_body
from agentrl.chat.formats.mistral import json_list
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema


def calls_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of calls, or a JSON object on each line."""
    body = body.strip()
    if not body.startswith("{"):
        return json_list(body)
    return [call for line in body.splitlines() if line.strip() for call in json_body(line, tools)]


FORMAT = CallFormat("<tool_calls>", "</tool_calls>", calls_body, signs=("<tool_calls>",))
