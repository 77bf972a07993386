"""Calls of Functionary 3.1: JSON arguments in `<function=NAME>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema


def function_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME>ARGUMENTS`."""
    name, closed, arguments = body.partition(">")
    if not closed:
        return [Found(error="the call is not of the form <function=name>{...}</function>")]
    return [Found(name.strip(), arguments.strip())]


FORMAT = CallFormat("<function=", "</function>", function_body, signs=("<function=", "</function>", "<|eom_id|>"))
