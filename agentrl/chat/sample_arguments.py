"""Made-up arguments that a tool's schema allows, which the start-up check writes and reads back."""

from __future__ import annotations

from typing import Any

from agentrl.chat.formats.arguments import resolved
from agentrl.tool import ToolSchema

SAMPLES: dict[str, tuple[Any, Any]] = {
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
UNKNOWN: Any = object()


def sample_arguments(tool: ToolSchema) -> list[dict[str, Any]]:
    """Make up two sets of arguments: with the first option of each choice, and with the last (null, where allowed).

    Parameters without a declared type are left out: their values cannot be told from text.
    """
    parameters = tool["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    first, last = (_members(properties, parameters, last, 0) for last in (False, True))
    return [first] if first == last else [first, last]


def _members(properties: dict[str, Any], root: Any, last: bool, depth: int) -> dict[str, Any]:
    values = {name: _sample(schema, root, last, depth) for name, schema in properties.items()}
    return {name: value for name, value in values.items() if value is not UNKNOWN}


def _sample(schema: Any, root: Any, last: bool, depth: int) -> Any:
    """Make up a value that `schema` allows, or UNKNOWN. `last`: of each choice the last option, not the first."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return UNKNOWN
    at = -1 if last else 0
    if "const" in schema:
        return schema["const"]
    if options := schema.get("enum"):
        return options[at]
    for key in ("anyOf", "oneOf", "allOf"):
        if options := schema.get(key):
            return _sample(options[at], root, last, depth + 1)
    return _sample_of_type(schema, root, last, depth)


def _sample_of_type(schema: dict[str, Any], root: Any, last: bool, depth: int) -> Any:
    kinds = schema.get("type", "")
    kind = kinds if isinstance(kinds, str) else "null" if last and "null" in kinds else kinds[0]
    if kind == "array" and "items" in schema:
        item = _sample(schema["items"], root, last, depth + 1)
        return [] if item is UNKNOWN else [item, item]
    if kind == "object" and schema.get("properties"):
        return _members(schema["properties"], root, last, depth + 1)
    return SAMPLES[kind][-1 if last else 0] if kind in SAMPLES else UNKNOWN
