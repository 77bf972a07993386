"""Calls of DeepSeek V3 and R1: a name and a fenced JSON block, in a group with markers of its own."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema


def fenced_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `function<｜tool▁sep｜>NAME`, then the arguments in a fenced JSON block."""
    _, separator, rest = body.partition("<｜tool▁sep｜>")
    if not separator:
        return [Found(error="the call has no <｜tool▁sep｜>")]
    name, _, fenced = rest.strip().partition("\n")
    return [Found(name.strip(), fenced.strip().removeprefix("```json").removesuffix("```").strip())]


FORMAT = CallFormat(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    fenced_body,
    group=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    signs=("<｜tool▁calls▁begin｜>",),
)
