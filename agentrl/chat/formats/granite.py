"""Calls of Granite 3: `<|tool_call|>` and a JSON array of them."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.mistral import json_list
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema


def calls_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of calls."""
    return json_list(body)


FORMAT = CallFormat("<|tool_call|>", "", calls_body, signs=("<|tool_call|>",))
