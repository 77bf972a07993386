"""Calls of Kimi K3: elements between tokens, an element for each argument, whose type says text or JSON."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from agentrl.chat.codec import GUARD
from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found, Turn, between, concatenated
from agentrl.tool import ToolSchema

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
TYPES = ("number", "boolean", "null", "array", "object")
TAGS = Tags(
    *(f'{OPEN}argument key="', '"', SEP, f"{CLOSE}argument{SEP}"),
    said_text=' type="string"',
    said_json=tuple(f' type="{kind}"' for kind in TYPES),
)
WHOLE = f'{OPEN}json type="object"{SEP}', f"{CLOSE}json{SEP}"
"""Around all arguments as one JSON object."""
CALL = f"{OPEN}call "
ELEMENTS = tuple(f"{OPEN}{name}" for name in ("think", "response", "tools"))
NOT_CLOSED = f"the call is not closed with {CLOSE}call{SEP}"
_HEAD = re.compile(r'call tool="([^"]*+)"(?: index="[0-9]++")?+')
_SPELLED = re.compile(r"<(?=\|(?:open|close|sep)\|>)")


def element_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `call tool="NAME" index="1"<|sep|>` and an `argument` element for each argument."""
    head, separator, inside = body.partition(SEP)
    read = _HEAD.fullmatch(head)
    if read is None or not separator:
        return [Found(error=f'the call is not of the form {OPEN}call tool="name" index="1"{SEP}...{CLOSE}call{SEP}')]
    name, inside = html.unescape(read[1]), inside.strip()
    if inside.startswith(WHOLE[0]) and inside.endswith(WHOLE[1]):
        return [Found(name, inside[len(WHOLE[0]) : -len(WHOLE[1])])]
    found = TAGS.read(name, inside, tools)
    if not isinstance(found.arguments, dict):
        return [found]
    return [Found(name, {html.unescape(key): value for key, value in found.arguments.items()})]


def read_elements(pieces: Sequence[tuple[str, str]]) -> Turn:
    """Take a turn apart into its elements `think`, `response` and `tools`, and the calls in the last."""
    turn = Turn([], [], [])
    inside = body = ""
    for tag, text, cut in _tags(pieces):
        if tag.startswith(CALL) and inside != "think":
            turn.bodies.extend([(body, NOT_CLOSED)] if body else [])
            body = f"{tag.removeprefix(OPEN)}{SEP}{_plain(text)}"
            continue
        if body and tag != f"{CLOSE}call":
            body += concatenated((marker, _plain(text)) for marker, text in cut)
            continue
        if body:
            turn.bodies.append((body, None))
            body = ""
        elif tag in ELEMENTS and inside != "think":
            inside = tag.removeprefix(OPEN)
        elif tag in (f"{CLOSE}{inside}", f"{CLOSE}message"):
            inside = ""
        else:
            text = concatenated(cut)
        (turn.thoughts if inside == "think" else turn.texts).append(text)
    turn.bodies.extend([(body, NOT_CLOSED)] if body else [])
    return turn


def _tags(pieces: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, Sequence[tuple[str, str]]]]:
    """Join what makes a tag. Yields the tag, empty for text; the text after it; and the pieces of both."""
    at = 0
    while at < len(pieces):
        cut = pieces[at : at + 2]
        if cut[0][0] in (OPEN, CLOSE) and cut[-1][0] == SEP:
            yield "".join(cut[0]), cut[1][1], cut
        else:
            cut = cut[:1]
            yield "", "", cut
        at += len(cut)


def _plain(text: str) -> str:
    """Break the spellings of markers, so that only the tokens are read as markers."""
    return _SPELLED.sub(f"<{GUARD}", text)


FORMAT = CallFormat(
    OPEN,
    CLOSE,
    element_body,
    tags=(SEP,),
    reasoning=(f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}"),
    signs=(OPEN, SEP, "'argument'"),
    messages=read_elements,
    display=between(CALL, f"{CLOSE}call{SEP}"),
)
