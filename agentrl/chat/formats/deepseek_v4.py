"""Calls of DeepSeek V4 and V3.2: `<｜DSML｜invoke>` tags whose parameters say whether they are text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

TAGS = Tags(
    '<｜DSML｜parameter name="', '" string="', '">', "</｜DSML｜parameter>", said_text="true", said_json=("false",)
)


def invoke_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read ` name="NAME">` and `<｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>`s."""
    before, _, rest = body.partition('name="')
    name, quoted, inside = rest.partition('">')
    if before.strip() or not quoted:
        return [Found(error='the call is not of the form <｜DSML｜invoke name="name">...</｜DSML｜invoke>')]
    return [TAGS.read(name, inside, tools)]


FORMAT = CallFormat(
    "<｜DSML｜invoke",
    "</｜DSML｜invoke>",
    invoke_body,
    group=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    signs=("｜DSML｜", "invoke"),
    families=("deepseek-v4",),
)
V32 = replace(
    FORMAT,
    group=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    signs=(*FORMAT.signs, "function_calls"),
    families=(),
)
"""V3.2 has the same calls in a group of another name."""
