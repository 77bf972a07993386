"""Calls of InternLM 2: `<|plugin|>` and a JSON object in `<|action_start|>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.hermes import json_body
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

PLUGIN = "<|plugin|>"


def plugin_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `<|plugin|>` and a call as a JSON object."""
    before, plugin, call = body.partition(PLUGIN)
    if not plugin or before.strip():
        return [Found(error=f"the call does not begin with {PLUGIN}")]
    return json_body(call, tools)


FORMAT = CallFormat(
    "<|action_start|>", "<|action_end|>", plugin_body, tags=(PLUGIN,), signs=("<|action_start|>", PLUGIN)
)
