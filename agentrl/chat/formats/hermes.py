"""Calls of Hermes, Qwen2.5 and Qwen3: a JSON object in `<tool_call>`.

Granite 20B Function Calling, GigaChat 3.1 and InternLM 2 have it after markers of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.chat.message import parse_json
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import FunctionCall

PLUGIN = "<|plugin|>"
MEMBERS = frozenset(("name", "arguments", "parameters", "id", "type"))
"""Members that a call may have; models write one of the second and third."""


def json_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `{"name": ..., "arguments": {...}}`; Llama 3 says `parameters`."""
    try:
        return [json_call(parse_json(body.strip()))]
    except ValueError as fault:
        return [Found(error=f"the call is not valid JSON: {fault}")]


def plugin_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `<|plugin|>` and a call as a JSON object."""
    before, plugin, call = body.partition(PLUGIN)
    if not plugin or before.strip():
        return [Found(error=f"the call does not begin with {PLUGIN}")]
    return json_body(call, tools)


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


def as_json(call: FunctionCall) -> str:
    """Write a call as the JSON that `json_body` reads; a malformed call with its text for arguments."""
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(call["name"], ensure_ascii=False)}, "arguments": {text}}}'


FORMAT = CallFormat(
    "<tool_call>",
    "</tool_call>",
    json_body,
    write=lambda calls: "\n".join(f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in calls),
    signs=("<tool_call>",),
    families=("qwen3", "qwen3-vl"),
)
GRANITE_20B = CallFormat("<function_call>", "", json_body, signs=("<function_call>",))
GIGACHAT = CallFormat("<|function_call|>", "", json_body, signs=("<|function_call|>",))
INTERNLM = CallFormat(
    "<|action_start|>", "<|action_end|>", plugin_body, tags=(PLUGIN,), signs=("<|action_start|>", PLUGIN)
)
