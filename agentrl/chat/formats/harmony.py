"""Calls of gpt-oss (Harmony): messages that say in a header whom they are for, and in which channel they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter

from agentrl.chat.formats.parsers import CallFormat, Found, Turn, concatenated
from agentrl.tool import ToolSchema

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
_TO = r"(?:\s++to=([^\s<]++))?+"
_HEADER = re.compile(
    rf"\s*+assistant{_TO}\s*+{re.escape(CHANNEL)}\s*+(analysis|commentary|final)\b{_TO}"
    rf"(?:\s*+(?:{re.escape(CONSTRAIN)})?+\s*+json\b)?+\s*+"
)


def addressed_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `functions.NAME<|message|>ARGUMENTS`."""
    recipient, _, arguments = body.partition(MESSAGE)
    return [Found(recipient.removeprefix("functions."), arguments.strip())]


def read_messages(pieces: Sequence[tuple[str, str]]) -> Turn:
    """Take a turn apart into its messages; the prompt has begun the first one with `<|start|>assistant`.

    Text between messages, and a message with an invalid header, is text of the turn.
    """
    turn = Turn([], [], [])
    begins = [0, *(at for at, (marker, _) in enumerate(pieces) if at and marker in (START, *ENDS))]
    for begin, end in zip(begins, [*begins[1:], len(pieces)], strict=True):
        _read_message(turn, pieces[begin:end], begin == 0, pieces[end][0] if end < len(pieces) else "")
    return Turn(["\n".join(turn.texts)], ["\n".join(turn.thoughts)], turn.bodies)


def _read_message(turn: Turn, pieces: Sequence[tuple[str, str]], first: bool, end: str) -> None:
    """Add one message to `turn`, or the text after one. `end`: the marker after it."""
    (marker, head), *parts = pieces
    markers = list(map(itemgetter(0), parts))
    if MESSAGE not in markers or not (first or marker == START):
        text = concatenated([("" if marker in ENDS else marker, head), *parts])
        turn.texts.extend([text] if text.strip() else [])
        return
    at = markers.index(MESSAGE)
    header, body = head + concatenated(parts[:at]), concatenated(parts[at:]).removeprefix(MESSAGE)
    read = _HEADER.fullmatch(f"assistant{header}" if first else header)
    # A header names its recipient before or after the channel.
    recipients = [] if read is None else list(dict.fromkeys(filter(None, read.group(1, 3))))
    if len(recipients) == 1:
        wrong = None if end == CALL else f"the call is not closed with {CALL}"
        turn.bodies.append((f"{recipients[0]}{MESSAGE}{body}", wrong))
    elif recipients or end == CALL or (read is None and "to=" in header):
        form = f"{START}assistant to=functions.name{CHANNEL}commentary json{MESSAGE}{{...}}{CALL}"
        turn.bodies.append((header + MESSAGE + body, f"the call is not of the form {form}"))
    elif read is None:
        turn.texts.append(concatenated(pieces))
    else:
        (turn.thoughts if read[2] == "analysis" else turn.texts).append(body)


FORMAT = CallFormat(
    MESSAGE,
    CALL,
    addressed_body,
    tags=(START, CHANNEL, CONSTRAIN, END, RETURN),
    reasoning=(f"{CHANNEL}analysis{MESSAGE}", END),
    signs=(CHANNEL, MESSAGE, CALL),
    messages=read_messages,
    ends=(RETURN, CALL),
    display=re.compile(rf" to=functions\..*?(?:{re.escape(CALL)}|\Z)", re.DOTALL),
)
