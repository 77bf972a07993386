"""Calls of Kimi K2: an id that names the function, and JSON arguments, in a section with markers of its own."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

ARGUMENTS = "<|tool_call_argument_begin|>"


def identified_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS`; the name may stand alone."""
    id, marker, arguments = body.partition(ARGUMENTS)
    if not marker:
        return [Found(error=f"the call is not of the form functions.name:index{ARGUMENTS}{{...}}")]
    id = id.strip()
    name, colon, index = id.removeprefix("functions.").rpartition(":")
    named = name if colon and index.isdecimal() else id.removeprefix("functions.")
    return [Found(named, arguments.strip(), id=id or None)]


FORMAT = CallFormat(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    identified_body,
    group=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    tags=(ARGUMENTS,),
    signs=("<|tool_call_begin|>", ARGUMENTS),
    families=("kimi-k2", "kimi-k2.5"),
    names_in_ids=True,
)
