"""Calls of Inkling, whose turns are messages of one kind each: thinking, text, or a call with a name and JSON."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.parsers import CallFormat, Found, Turn, concatenated
from agentrl.chat.message import parse_json
from agentrl.tool import ToolSchema

MODEL, END = "<|message_model|>", "<|end_message|>"
TEXT, THINKING = "<|content_text|>", "<|content_thinking|>"
JSON_CALL, TEXT_CALL = "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"


def invoked_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME<|content_invoke_tool_json|>{"name": NAME, "args": {...}}`."""
    before, marker, payload = body.partition(JSON_CALL)
    name = before.strip()
    if not marker:
        return [Found(error=f'the call is not of the form name{JSON_CALL}{{"name": name, "args": {{...}}}}')]
    try:
        value = parse_json(payload)
    except ValueError as fault:
        return [Found(name, error=f"the call is not valid JSON: {fault}")]
    if not isinstance(value, dict) or value.keys() != {"name", "args"}:
        return [Found(name, error='the call must be a JSON object with the members "name" and "args"')]
    if name not in ("", value["name"]):
        return [Found(name, error=f"the call names two functions, {name[:64]!r} and {str(value['name'])[:64]!r}")]
    return [Found(value["name"], value["args"])]


def read_messages(pieces: Sequence[tuple[str, str]]) -> Turn:
    """Take a turn apart into its messages. A call may stand after thinking that was not ended."""
    turn = Turn([], [], [])
    begins = [0, *(at for at, (marker, _) in enumerate(pieces) if at and marker in (MODEL, END))]
    for begin, end in zip(begins, [*begins[1:], len(pieces)], strict=True):
        closed = end < len(pieces) and pieces[end][0] == END
        (_, head), *parts = pieces[begin:end]
        for at, (kind, text) in enumerate(parts):
            if kind in (JSON_CALL, TEXT_CALL):
                wrong = None if closed else f"the call is not closed with {END}"
                turn.bodies.append((head + concatenated(parts[at:]), wrong))
                break
            (turn.thoughts if kind == THINKING else turn.texts).append(head + text)
            head = ""
        else:
            turn.texts.append(head)
    return turn


FORMAT = CallFormat(
    JSON_CALL,
    END,
    invoked_body,
    tags=(MODEL, TEXT, THINKING, TEXT_CALL),
    reasoning=(THINKING, END),
    signs=(JSON_CALL, END),
    families=("inkling",),
    messages=read_messages,
)
