"""Calls of MiniMax: `<invoke>` tags in `<minimax:tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

TAGS = Tags('<parameter name="', '">', "", "</parameter>")


def invoke_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>`, any number of them."""
    found = []
    before, *calls = body.split('<invoke name="')
    for call in calls:
        name, quoted, rest = call.partition('">')
        inside, closed, behind = rest.partition("</invoke>")
        if quoted and closed and not behind.strip():
            found.append(TAGS.read(name, inside, tools))
        else:
            found.append(Found(error='a call is not of the form <invoke name="name">...</invoke>'))
    if before.strip() or not found:
        return [Found(error='the call has no <invoke name="name"> at its beginning')]
    return found


FORMAT = CallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    invoke_body,
    signs=("<minimax:tool_call>",),
    families=("minimax-m2",),
)
