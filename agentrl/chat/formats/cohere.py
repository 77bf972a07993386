"""Calls of Cohere's Command R7B and Command A: a JSON array of actions in `<|START_ACTION|>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.hermes import json_call
from agentrl.chat.formats.mistral import json_list
from agentrl.chat.formats.parsers import MOST_DIGITS, CallFormat, Found
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema

MEMBERS = {"tool_call_id": "id", "tool_name": "name", "parameters": "parameters"}
"""Members of an action, and their names in calls of other families."""


def actions_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of `{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}`."""
    return json_list(body, action)


def action(value: JSON) -> Found:
    """Read an action from a parsed JSON value."""
    if isinstance(value, dict) and not value.keys() <= MEMBERS.keys():
        shown = [name[:64] for name in value if name not in MEMBERS][:3]
        return Found(value.get("tool_name"), error=f"the action has the members {shown} beside {list(MEMBERS)}")
    found = json_call({MEMBERS[name]: member for name, member in value.items()} if isinstance(value, dict) else value)
    if found.id is not None and not (found.id.isdecimal() and found.id.isascii() and len(found.id) <= MOST_DIGITS):
        return Found(found.name, error=f"the action's tool_call_id must be its number, not {found.id[:64]!r}")
    return found


FORMAT = CallFormat(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    actions_body,
    reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
    names_in_ids=True,
    numbers_calls=True,
    signs=("<|START_ACTION|>", '"tool_name"'),
)
