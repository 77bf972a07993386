"""Calls of Mistral: `[TOOL_CALLS]` and a JSON array of them, or since Small 3.2 one call a marker.

Jamba, Hunyuan A13B, Apriel and MiniMax M1 have the array, or JSON objects line by line, in `<tool_calls>`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.chat.formats.hermes import json_body, json_call
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.chat.message import parse_json
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema


def calls_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of calls, or `NAME[ARGS]ARGUMENTS`, which may hold `[CALL_ID]ID` after the name."""
    if body.lstrip().startswith(("[", "{")):
        return json_list(body)
    head, marker, arguments = body.partition("[ARGS]")
    if not marker:
        return [Found(error="the call is neither a JSON array nor of the form name[ARGS]{...}")]
    name, _, id = head.partition("[CALL_ID]")
    return [Found(name.strip(), arguments.strip(), id=id.strip() or None)]


def json_list(body: str, read: Callable[[JSON], Found] = json_call) -> list[Found]:
    """Read a JSON array of calls, each by `read`."""
    try:
        value = parse_json(body.strip())
    except ValueError as fault:
        return [Found(error=f"the calls are not a valid JSON array: {fault}")]
    return [read(item) for item in (value if isinstance(value, list) else [value])]


def lines_or_list_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of calls, or a JSON object on each line."""
    body = body.strip()
    if not body.startswith("{"):
        return json_list(body)
    return [call for line in body.split("\n") if line.strip() for call in json_body(line, tools)]


FORMAT = CallFormat("[TOOL_CALLS]", "", calls_body, tags=("[ARGS]", "[CALL_ID]"), signs=("[TOOL_CALLS]",))
JAMBA = CallFormat("<tool_calls>", "</tool_calls>", lines_or_list_body, signs=("<tool_calls>",))
