"""Calls of MiniMax: `<invoke>` tags in `<minimax:tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

TAGS = Tags('<parameter name="', '">', "", "</parameter>")


def invoke_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>`, any number of them."""
    return read_invokes("invoke", TAGS, body, tools)


def read_invokes(tag: str, tags: Tags, body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read any number of calls, each in a `tag`, and their parameters by `tags`."""
    found = []
    before, *calls = body.split(f'<{tag} name="')
    for call in calls:
        name, quoted, rest = call.partition('">')
        inside, closed, behind = rest.partition(f"</{tag}>")
        if quoted and closed and not behind.strip():
            found.append(tags.read(name, inside, tools))
        else:
            found.append(Found(error=f'a call is not of the form <{tag} name="name">...</{tag}>'))
    if before.strip() or not found:
        return [Found(error=f'the call has no <{tag} name="name"> at its beginning')]
    return found


FORMAT = CallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    invoke_body,
    signs=("<minimax:tool_call>",),
    families=("minimax-m2",),
)
