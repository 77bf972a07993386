"""Calls of GLM and Laguna: the name and pairs of `<arg_key>` and `<arg_value>` in `<tool_call>`.

Hunyuan 3's markers have names that end in `:opensource`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

TAGS = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
SEPARATOR = "<tool_sep:opensource>"
HY3_TAGS = Tags("<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>")


def keyed_body(tags: Tags, separator: str, body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`, in HY3 with a separator after the name."""
    name = body.partition(separator or tags.key_open)[0]
    pairs = body[len(name) :]
    if separator and not pairs:
        return [Found(error=f"the call has no {separator}")]
    return [tags.read(name.strip(), pairs.removeprefix(separator), tools)]


FORMAT = CallFormat(
    "<tool_call>",
    "</tool_call>",
    partial(keyed_body, TAGS, ""),
    tags=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    signs=("<tool_call>", "<arg_key>"),
    families=(
        *("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
        *("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
    ),
)
HY3 = CallFormat(
    "<tool_call:opensource>",
    "</tool_call:opensource>",
    partial(keyed_body, HY3_TAGS, SEPARATOR),
    group=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    reasoning=("<think:opensource>", "</think:opensource>"),
    tags=(SEPARATOR, HY3_TAGS.key_open, HY3_TAGS.key_close, HY3_TAGS.value_open, HY3_TAGS.value_close),
    signs=(":opensource", "<tool_sep"),
    families=("hy3",),
)
