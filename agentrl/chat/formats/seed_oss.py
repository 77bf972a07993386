"""Calls of Seed-OSS: tags as Qwen3-Coder's, values directly between them, in `<seed:tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.chat.formats.qwen3_coder import read_tagged
from agentrl.tool import ToolSchema

TAGS = Tags("<parameter=", ">", "", "</parameter>")


def tagged_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`."""
    return read_tagged(TAGS, body, tools)


FORMAT = CallFormat(
    "<seed:tool_call>",
    "</seed:tool_call>",
    tagged_body,
    reasoning=("<seed:think>", "</seed:think>"),
    signs=("<seed:tool_call>", "<function=", "<parameter="),
)
