"""Calls of MiniMax M3: `<invoke>` tags with an element for each value, nested as the values are, each after a mark."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import MAX_DEPTH, admits, parameters_of, read_argument
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.system.json_value import JSON, as_object
from agentrl.tool import Schema, ToolSchema
from agentrl.tool.schema import resolved

MARK = "]<]minimax[>["
"""Before every tag."""
ITEM = "item"
Element = tuple[str, str, list["Element"]]
"""An element's tag, its text, and its members."""


def invoke_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `<invoke name="NAME"><KEY>VALUE</KEY>...</invoke>`, any number of them."""
    try:
        calls = read_elements(body)
    except ValueError as fault:
        return [Found(error=f"the call cannot be read: {fault}")]
    return [_call(*call, tools) for call in calls] or [Found(error='the call has no <invoke name="name">')]


def _call(tag: str, text: str, members: list[Element], tools: Sequence[ToolSchema]) -> Found:
    name = tag.removeprefix('invoke name="').removesuffix('"')
    if f'invoke name="{name}"' != tag or text.strip():
        return Found(error=f'a call is not of the form {MARK}<invoke name="name">...{MARK}</invoke>')
    root = parameters_of(name, tools)
    try:
        return Found(name, _members(members, root, root))
    except ValueError as fault:
        return Found(name, error=f"the arguments cannot be read: {fault}")


def read_elements(text: str) -> list[Element]:
    """Read elements, one after the other. Raises ValueError for text between them, or an element that is not closed."""
    first, *pieces = text.split(MARK)
    root: Element = ("", first, [])
    opened = [root]
    for piece in pieces:
        tag, closed, text = piece.removeprefix("<").partition(">")
        if not (piece.startswith("<") and closed):
            raise ValueError(f"{MARK} before {piece[:64]!r}, which is no tag")
        if tag.startswith("/"):
            ended = opened.pop()
            if not opened or ended[0].partition(" ")[0] != tag[1:]:
                raise ValueError(f"<{tag[:64]}> closes nothing")
            if text.strip():
                raise ValueError(f"text after <{tag[:64]}>: {text[:64]!r}")
        else:
            if len(opened) > MAX_DEPTH or (opened[-1][1].strip() and len(opened) > 1):
                raise ValueError(f"<{tag[:64]}> after text, or nested too deeply")
            element: Element = (tag, text, [])
            opened[-1][2].append(element)
            opened.append(element)
    if len(opened) > 1 or first.strip():
        raise ValueError(f"<{opened[-1][0][:64]}> is not closed" if len(opened) > 1 else f"text {first[:64]!r}")
    return root[2]


def _members(elements: list[Element], schema: Schema, root: Schema) -> dict[str, JSON]:
    members: dict[str, JSON] = {}
    schemas, other = as_object(schema.get("properties")), schema.get("additionalProperties")
    for tag, text, inner in elements:
        if tag in members:
            raise ValueError(f"{tag[:64]!r} is given twice")
        members[tag] = _value(text, inner, schemas.get(tag, other), root)
    return members


def _value(text: str, elements: list[Element], schema: JSON, root: Schema) -> JSON:
    """Read a value by its schema: a list of `item` elements, an object of others, or text."""
    schema = resolved(schema, root)
    known = schema if isinstance(schema, dict) else {}
    if not elements:
        empty: tuple[JSON, ...] = () if text or not known.get("type") or admits(schema, "", root) else ([], {})
        return next((value for value in empty if admits(schema, value, root)), read_argument(text, schema, root))
    if all(tag == ITEM for tag, _, _ in elements) and (len(elements) > 1 or admits(schema, [], root)):
        return [_value(text, inner, known.get("items"), root) for _, text, inner in elements]
    return dict(_members(elements, known, root))


FORMAT = CallFormat(
    f"{MARK}<tool_call>",
    f"{MARK}</tool_call>",
    invoke_body,
    reasoning=("<mm:think>", "</mm:think>"),
    signs=(MARK, "<invoke name="),
)
