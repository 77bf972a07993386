"""Calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: tags for the function and each parameter in `<tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import tagged_call
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema


def tagged_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`."""
    start = body.find("<function=")
    name, end, rest = body[start + len("<function=") :].partition(">")
    if start < 0 or not end:
        return [Found(error="the call has no <function=name>")]
    return [tagged_call(name, rest, ("<parameter=", ">", "\n"), tools)]


FORMAT = CallFormat(
    "<tool_call>",
    "</tool_call>",
    tagged_body,
    signs=("<tool_call>", "<function="),
    families=("prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
)
