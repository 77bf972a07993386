"""Calls of DeepSeek V3, R1 and V3.1: a name and JSON arguments, in a group with markers of its own."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema


def fenced_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `function<｜tool▁sep｜>NAME` and fenced JSON arguments, or V3.1's `NAME<｜tool▁sep｜>ARGUMENTS`."""
    before, separator, rest = body.partition("<｜tool▁sep｜>")
    if not separator:
        return [Found(error="the call has no <｜tool▁sep｜>")]
    name, _, fenced = rest.strip().partition("\n")
    # A function of V3.1 may be called `function`, too; its arguments begin with a brace.
    if before.strip() != "function" or name.startswith("{"):
        return [Found(before.strip(), rest.strip())]
    return [Found(name.strip(), fenced.strip().removeprefix("```json").removesuffix("```").strip())]


FORMAT = CallFormat(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    fenced_body,
    group=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    tags=("<｜tool▁sep｜>",),
    signs=("<｜tool▁calls▁begin｜>",),
    families=("deepseek-v3", "deepseek-r1"),
)
