"""Made-up arguments that a tool's schema allows, which the start-up check writes and reads back."""

from __future__ import annotations

from agentrl.chat.formats.arguments import NO_VALUE, NoValue
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.tool import Schema, ToolSchema
from agentrl.tool.schema import resolved

SAMPLES: dict[str, tuple[JSON, JSON]] = {
    "string": ("text", "text"),
    "integer": (3, -2),
    "number": (1.5, 2),
    "boolean": (True, False),
    "array": ([1, 2], [True, None, "text"]),
    "object": ({"key": "value"}, {"key": [False, None, {"it's": 1.5}]}),
    "null": (None, None),
}
"""By JSON type, two values that templates write in different ways."""
MAX_DEPTH = 4


def sample_arguments(tool: ToolSchema) -> list[dict[str, JSON]]:
    """Make up two sets of arguments: with the first option of each choice, and with the last (null, where allowed).

    Parameters without a declared type are left out: their values cannot be told apart from text.
    """
    parameters = tool["function"].get("parameters") or {}
    first, last = (_members(parameters, parameters, last, 0) for last in (False, True))
    return [first] if first == last else [first, last]


def _members(schema: Schema, root: Schema, last: bool, depth: int) -> dict[str, JSON]:
    properties = as_object(schema.get("properties"))
    values = {name: _sample(member, root, last, depth) for name, member in properties.items()}
    return {name: value for name, value in values.items() if not isinstance(value, NoValue)}


def _sample(schema: JSON, root: Schema, last: bool, depth: int) -> JSON | NoValue:
    """Make up a value that `schema` allows, or NO_VALUE. `last`: of each choice the last option, not the first."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return NO_VALUE
    at = -1 if last else 0
    if "const" in schema:
        return schema["const"]
    if options := as_list(schema.get("enum")):
        return options[at]
    for key in ("anyOf", "oneOf", "allOf"):
        if options := as_list(schema.get(key)):
            return _sample(options[at], root, last, depth + 1)
    return _sample_of_type(schema, root, last, depth)


def _sample_of_type(schema: Schema, root: Schema, last: bool, depth: int) -> JSON | NoValue:
    kinds = schema.get("type")
    named = [kind for kind in as_list(kinds) if isinstance(kind, str)] if not isinstance(kinds, str) else [kinds]
    kind = "null" if last and "null" in named else named[0] if named else ""
    if kind == "array" and "items" in schema:
        item = _sample(schema["items"], root, last, depth + 1)
        return [] if isinstance(item, NoValue) else [item, item]
    if kind == "object" and schema.get("properties"):
        return _members(schema, root, last, depth + 1)
    return SAMPLES[kind][-1 if last else 0] if kind in SAMPLES else NO_VALUE
