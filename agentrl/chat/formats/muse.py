"""Calls of Muse: messages that say in a header whom they are for, calls as `<atem:invoke>` tags."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.minimax import read_invokes
from agentrl.chat.formats.parsers import CallFormat, Found, Turn, between, concatenated
from agentrl.tool import ToolSchema

START, MESSAGE, NEXT = "<|start|>", "<|message|>", "<|eom|>"
BEGIN, END = "<atem:function_calls>", "</atem:function_calls>"
TAGS = Tags('<atem:parameter name="', '">', "", "</atem:parameter>")
_HEADER = re.compile(r"\s*+assistant\s++to=([^\s<]++)\s*+")


def invoked_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `RECIPIENT<|message|><atem:function_calls>...</atem:function_calls>`."""
    recipient, _, text = body.partition(MESSAGE)
    text = text.strip()
    if not (text.startswith(BEGIN) and text.endswith(END)):
        return [Found(error=f"the message to {recipient[:64]!r} is not of the form {BEGIN}...{END}")]
    found = read_invokes("atem:invoke", TAGS, text[len(BEGIN) : -len(END)], tools)
    return [_addressed(recipient, call) for call in found]


def _addressed(recipient: str, call: Found) -> Found:
    """Check that a call is in a message to its function, or to the name before its first dot."""
    name = str(call.name)
    if call.error or recipient in (name, name.partition(".")[0]):
        return call
    return Found(call.name, error=f"a call of {name[:64]!r} is in a message to {recipient[:64]!r}")


def read_messages(pieces: Sequence[tuple[str, str]]) -> Turn:
    """Take a turn apart into its messages; the prompt has begun the first one with `<|start|>assistant`."""
    turn = Turn([], [], [])
    begins = [0, *(at for at, (marker, _) in enumerate(pieces) if at and marker in (START, NEXT))]
    for begin, end in zip(begins, [*begins[1:], len(pieces)], strict=True):
        (marker, head), *parts = pieces[begin:end]
        header = _HEADER.fullmatch(head if begin else f"assistant{head}") if parts and parts[0][0] == MESSAGE else None
        if header is None or marker == NEXT:
            text = ("" if marker == NEXT else marker) + head + concatenated(parts)
            turn.texts.extend([text] if text.strip() else [])
            continue
        said = concatenated(parts)[len(MESSAGE) :]
        if header[1] in ("self", "user"):
            (turn.thoughts if header[1] == "self" else turn.texts).append(said)
        else:
            turn.bodies.append((f"{header[1]}{MESSAGE}{said}", None))
    return Turn(["\n".join(turn.texts)], ["\n".join(turn.thoughts)], turn.bodies)


FORMAT = CallFormat(
    MESSAGE,
    NEXT,
    invoked_body,
    tags=(START,),
    reasoning=(f" to=self{MESSAGE}", NEXT),
    signs=("<atem:invoke", MESSAGE),
    messages=read_messages,
    display=between(BEGIN, END),
)
