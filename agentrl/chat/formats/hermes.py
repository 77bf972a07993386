"""Calls of Hermes, Qwen2.5 and Qwen3: a JSON object in `<tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.chat.message import parse_json
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema

MEMBERS = frozenset(("name", "arguments", "parameters", "id", "type"))
"""Members that a call may have; models write one of the second and third."""


def json_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `{"name": ..., "arguments": {...}}`; Llama 3 says `parameters`."""
    try:
        return [json_call(parse_json(body.strip()))]
    except ValueError as fault:
        return [Found(error=f"the call is not valid JSON: {fault}")]


def json_call(value: JSON) -> Found:
    """Read a call from a parsed JSON value.

    Another member is an error: it may be a misspelled "arguments", without which the call would run.
    """
    if not isinstance(value, dict):
        return Found(error=f"the call must be a JSON object, not {type(value).__name__}")
    if ("name" in value and not value.keys() <= MEMBERS) or ("arguments" in value and "parameters" in value):
        shown = [name[:64] for name in value if name not in MEMBERS][:3] or ["arguments", "parameters"]
        return Found(value.get("name"), error=f"the call has the members {shown} beside a name and its arguments")
    id = value.get("id")
    if value.get("type", "function") != "function" or not isinstance(id, str | None):
        return Found(value.get("name"), error='the call\'s type must be "function", and its id a text')
    return Found(value.get("name"), value.get("arguments", value.get("parameters")), id=id)


FORMAT = CallFormat("<tool_call>", "</tool_call>", json_body, signs=("<tool_call>",), families=("qwen3", "qwen3-vl"))
