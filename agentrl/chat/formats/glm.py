"""Calls of GLM and Laguna: the name and pairs of `<arg_key>` and `<arg_value>` in `<tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

TAGS = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def keyed_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`."""
    name = body.partition(TAGS.key_open)[0]
    return [TAGS.read(name.strip(), body[len(name) :], tools)]


FORMAT = CallFormat(
    "<tool_call>",
    "</tool_call>",
    keyed_body,
    tags=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    signs=("<tool_call>", "<arg_key>"),
    families=(
        *("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
        *("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
    ),
)
