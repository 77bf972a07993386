"""Calls of MiniCPM 5: `<function name="NAME">` with `<param>` tags, odd text in them as CDATA."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

TAGS = Tags('<param name="', '">', "", "</param>")
CDATA = "<![CDATA[", "]]>"


def function_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME"><param name="KEY">VALUE</param>...`."""
    name, quoted, inside = body.partition('">')
    if not quoted:
        return [Found(error='the call is not of the form <function name="name">...</function>')]
    found = TAGS.read(name, inside, tools)
    arguments = found.arguments if isinstance(found.arguments, dict) else {}
    for key, value in arguments.items():
        if isinstance(value, str) and value.startswith(CDATA[0]) and value.endswith(CDATA[1]):
            arguments[key] = value[len(CDATA[0]) : -len(CDATA[1])]
    return [found]


FORMAT = CallFormat(
    '<function name="', "</function>", function_body, signs=('<function name="', '<param name="', CDATA[0])
)
