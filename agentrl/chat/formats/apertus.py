"""Calls of Apertus: a JSON array of objects `{NAME: ARGUMENTS}` in `<|tools_prefix|>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.mistral import json_list
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema


def named_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of `{NAME: ARGUMENTS}`."""
    return json_list(body, named_call)


def named_call(value: JSON) -> Found:
    """Read a call from a parsed JSON value."""
    if not isinstance(value, dict) or len(value) != 1:
        return Found(error="the call must be a JSON object with one member, the function's name and its arguments")
    ((name, arguments),) = value.items()
    return Found(name, arguments)


FORMAT = CallFormat(
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    named_body,
    reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
    signs=("<|tools_prefix|>", "<|tools_suffix|>"),
    ends=("<|tools_suffix|>",),
)
