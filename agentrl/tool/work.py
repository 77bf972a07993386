"""Work that a JSON schema makes of a value, bounded before a validator sees it: schemas also come from rows and logs.

Schemas that judge the same value multiply: where each of twenty definitions names the next one twice, the last one is
judged a million times. So they are counted as a validator meets them, in time linear in the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.tool.schema import Schema, pointed_at

MOST = 10_000
"""Schemas that may judge one value."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_OUTSIDE = ("http://json-schema.org/", "https://json-schema.org/")
"""Beginnings of references to JSON Schema's own schemas, which the validator brings."""
_OF_OUTSIDE = 100


class Unbounded(Exception):
    """A schema that makes too much work, or whose work cannot be counted."""


class _Keywords(NamedTuple):
    """Keywords whose value is a schema, a list of them, or several by name."""

    one: tuple[str, ...]
    several: tuple[str, ...]
    named: tuple[str, ...]

    def schemas(self, schema: Schema) -> Iterator[Schema]:
        found = [schema.get(key) for key in self.one]
        found += [item for key in self.several for item in as_list(schema.get(key))]
        found += [item for key in self.named for item in as_object(schema.get(key)).values()]
        return (one for one in found if isinstance(one, dict))


_SAME_VALUE = _Keywords(
    ("not", "if", "then", "else"), ("allOf", "anyOf", "oneOf"), ("dependentSchemas", "dependencies")
)
_MEMBERS = _Keywords(
    (
        *("items", "contains", "additionalItems", "unevaluatedItems"),
        *("propertyNames", "additionalProperties", "unevaluatedProperties", "contentSchema"),
    ),
    ("items", "prefixItems"),
    ("properties", "patternProperties"),
)
_DEFINITIONS = _Keywords((), (), ("$defs", "definitions"))


class Work:
    """Counter of the schemas that judge a value."""

    def __init__(self, root: Schema) -> None:
        """Count the schemas that judge one value, at each place of `root`. Raises Unbounded, RecursionError."""
        self._root, self._levels = root, list[dict[int, int | None]]()
        """For each depth of a value, the work by a schema's `id`; None: it is being counted."""
        named = "id" if re.search(r"draft-0?[34]", str(root.get("$schema"))) else "$id"
        self._places, waiting = dict[int, Schema](), [root]
        while waiting:
            schema = waiting.pop()
            if id(schema) in self._places:
                continue
            self._places[id(schema)] = schema
            if schema is not root and isinstance(schema.get(named), str):
                raise Unbounded(f"it has `{named}` below its top, which changes where references lead; leave it out")
            if self._of(schema, 0) > MOST:
                raise Unbounded(f"more than {MOST:,} of its schemas would judge one value; name each of them once")
            waiting += [*self._same(schema), *_MEMBERS.schemas(schema), *_DEFINITIONS.schemas(schema)]

    def is_much(self, value: JSON) -> bool:
        """Say whether more than MOST schemas may judge a value and, one in the other, its members.

        True, too, where it would take long to say.
        """
        if (deepest := _depth(value)) * len(self._places) > MOST:
            return True
        for depth in range(deepest + 1):
            for schema in self._places.values():  # All of a depth before the next one, so no recursion is deep.
                self._of(schema, depth)
            if self._of(self._root, depth) > MOST:
                return True
            if depth and self._levels[depth] == self._levels[depth - 1]:
                return False
        return False

    def _of(self, schema: Schema, depth: int) -> int:
        if depth == len(self._levels):
            self._levels.append({})
        level = self._levels[depth]
        if id(schema) in level:
            if (known := level[id(schema)]) is None:
                raise Unbounded("a reference leads back to itself about the same value; let it stand in a property")
            return known
        level[id(schema)] = None
        work = 1 + sum(self._of(part, depth) for part in self._same(schema))
        work += sum(_OF_OUTSIDE for key in _REFERENCES if str(schema.get(key)).startswith(_OUTSIDE))
        if depth:
            work += max((self._of(part, depth - 1) for part in _MEMBERS.schemas(schema)), default=0)
        level[id(schema)] = work
        return work

    def _same(self, schema: Schema) -> list[Schema]:
        """List the schemas that judge the same value."""
        found = list(_SAME_VALUE.schemas(schema))
        for key in _REFERENCES:
            reference = schema.get(key)
            if not isinstance(reference, str) or (reference.startswith(_OUTSIDE) and "$id" not in self._root):
                continue
            try:
                target = pointed_at(reference, self._root)
            except LookupError:
                raise Unbounded(
                    f"expected `{key}` to be a path to a schema in it, like #/$defs/name, found {reference!r:.80}"
                ) from None
            found += [target] if isinstance(target, dict) else []
        return found


def _depth(value: JSON) -> int:
    depth, level = 0, [value]
    while True:
        inner = [one for one in level if isinstance(one, (Mapping, list))]
        level = [item for one in inner for item in (one.values() if isinstance(one, Mapping) else one)]
        if not level:
            return depth
        depth += 1
