"""Calls of MiniCPM 5: `<function name="NAME">` with `<param>` tags, odd text in them as CDATA."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

CDATA = "<![CDATA[", "]]>"
TAGS = Tags('<param name="', '">', "", "</param>", quotes=CDATA)


def function_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME"><param name="KEY">VALUE</param>...`."""
    name, quoted, inside = body.partition('">')
    if not quoted:
        return [Found(error='the call is not of the form <function name="name">...</function>')]
    return [TAGS.read(name, inside, tools)]


FORMAT = CallFormat(
    '<function name="', "</function>", function_body, signs=('<function name="', '<param name="', CDATA[0])
)
