"""Arguments of calls in columns of structs, where Arrow gives each call the members of all, with null for absent ones.

An intended null and a filled-in null look the same. A member is a call's own if some call of that name in the file
gives it. The row's tools, if any, must not say that it cannot be null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import cast

import pyarrow as pa

from agentrl.chat.message import parse_json
from agentrl.data.messages import CALLS
from agentrl.system.json_value import JSON, as_list, as_object

Path = tuple[str, ...]


def holds_filling(column_type: pa.DataType) -> bool:
    """Check whether a column has arguments of calls as structs."""
    fields = [column_type.field(index) for index in range(column_type.num_fields)]
    own = any(field.name == "arguments" and pa.types.is_struct(field.type) for field in fields)
    return own or any(holds_filling(field.type) for field in fields)


class Filling:
    """Members that calls of each name give, over the rows of a file."""

    def __init__(self) -> None:
        self._given: set[Path] = set()

    def note(self, messages: object) -> None:
        """Note the members that the calls of a row's messages give."""
        for name, function in _functions(messages):
            self._given.update(_given(function["arguments"], (name,)))

    def without(self, messages: object, tools: object = None) -> object:
        """Drop the members of arguments that no call of that name gives, from messages in place; return them.

        tools: the row's OpenAI schemas, as a list or in JSON text; None without tools.
        """
        text = tools if isinstance(tools, str) else json.dumps(tools, default=str)
        for name, function in _functions(messages):
            function["arguments"] = self._own(function["arguments"], (name,), _parameters(text).get(name))
        return messages

    def _own(self, value: JSON, path: Path, schema: JSON) -> JSON:
        if isinstance(value, list):
            return [self._own(item, path, as_object(schema).get("items")) for item in value]
        if not isinstance(value, dict):
            return value
        properties = as_object(as_object(schema).get("properties"))
        return {
            key: self._own(item, (*path, key), properties.get(key))
            for key, item in value.items()
            if item is not None or ((*path, key) in self._given and _nullable(properties.get(key)))
        }


def _functions(messages: object) -> Iterator[tuple[str, dict[str, JSON]]]:
    """Iterate over name and function of the calls whose arguments are an object."""
    for message in as_list(cast(JSON, messages)):
        for found in map(as_object(message).get, CALLS):
            for call in map(as_object, found if isinstance(found, list) else [found]):
                function = call.get("function") or call
                if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                    yield str(function.get("name")), function


def _given(value: JSON, path: Path) -> Iterator[Path]:
    if isinstance(value, list):
        for item in value:
            yield from _given(item, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            if item is not None:
                yield (*path, key)
                yield from _given(item, (*path, key))


@lru_cache(4096)
def _parameters(tools: str) -> dict[str, JSON]:
    """Return the schemas of the tools' parameters, by name; entries that are no tool are left to the column's check."""
    try:
        schemas = as_list(parse_json(tools))
    except ValueError:
        return {}
    functions = [as_object(as_object(schema).get("function", schema)) for schema in schemas]
    return {str(function.get("name")): function.get("parameters") for function in functions}


def _nullable(schema: JSON) -> bool:
    """Check whether a JSON schema may hold null; true where it does not say."""
    keys = as_object(schema)
    kinds = keys.get("type")
    if keys.get("nullable") is True or kinds is None:
        alternatives = [*as_list(keys.get("anyOf")), *as_list(keys.get("oneOf"))]
        return not alternatives or any(map(_nullable, alternatives))
    return "null" in (kinds if isinstance(kinds, list) else [kinds])
