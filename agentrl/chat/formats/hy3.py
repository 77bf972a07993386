"""Calls of Hunyuan 3: the name and pairs of key and value, with markers whose names end in `:opensource`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

SEPARATOR = "<tool_sep:opensource>"
TAGS = Tags("<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>")


def keyed_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME<tool_sep:opensource>`, then the pairs."""
    name, separator, pairs = body.partition(SEPARATOR)
    if not separator:
        return [Found(error=f"the call has no {SEPARATOR}")]
    return [TAGS.read(name.strip(), pairs, tools)]


FORMAT = CallFormat(
    "<tool_call:opensource>",
    "</tool_call:opensource>",
    keyed_body,
    group=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    reasoning=("<think:opensource>", "</think:opensource>"),
    tags=(SEPARATOR, TAGS.key_open, TAGS.key_close, TAGS.value_open, TAGS.value_close),
    signs=(":opensource", "<tool_sep"),
    families=("hy3",),
)
