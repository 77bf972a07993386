"""Calls of Functionary 3.1 and 3.2.

Functionary 3.1 writes JSON arguments in `<function=NAME>`. Functionary 3.2 writes `>>>NAME`, a newline and JSON
arguments; `>>>all` is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.parsers import CallFormat, Found, Turn
from agentrl.tool import ToolSchema

MARK = ">>>"
_RECIPIENT = re.compile(r"([\w.-]++)\n")


def function_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME>ARGUMENTS`."""
    name, closed, arguments = body.partition(">")
    if not closed:
        return [Found(error="the call is not of the form <function=name>{...}</function>")]
    return [Found(name.strip(), arguments.strip())]


def addressed_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME` and JSON arguments on the next line."""
    name, _, arguments = body.partition("\n")
    return [Found(name, arguments.strip())]


def read_messages(pieces: Sequence[tuple[str, str]]) -> Turn:
    """Take a turn apart at each `>>>RECIPIENT`; the prompt has begun the first one with `>>>`."""
    turn = Turn([], [], [])
    parts: list[list[str]] = [[]]
    for marker, text in pieces:
        if _RECIPIENT.match(text):
            parts.append([text])
        else:
            parts[-1] += marker, text
    for part in map("".join, parts):
        recipient = _RECIPIENT.match(part)
        if recipient is None or recipient[1] == "all":
            turn.texts.append(part[recipient.end() if recipient else 0 :])
        else:
            turn.bodies.append((part, None))
    return turn


V3_2 = CallFormat(MARK, "", addressed_body, signs=(">>>all",), messages=read_messages)
FORMAT = CallFormat("<function=", "</function>", function_body, signs=("<function=", "</function>", "<|eom_id|>"))
