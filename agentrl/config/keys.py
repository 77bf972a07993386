"""The keys of a schema: their dotted paths, defaults and nearest neighbours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from agentrl.config.section import Section

MISSING = "???"
"""OmegaConf's mark of a value that must be given."""


def leaf_keys(schema: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key of the schema by its dotted path."""
    leaves: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            leaves |= leaf_keys(section, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = field
    return leaves


def defaults(schema: type[Section]) -> dict[str, Any]:
    """The schema's defaults as a tree of plain values; `???` where a value must be given."""
    tree: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            tree[name] = default.model_dump(mode="json")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            tree[name] = defaults(field.annotation)
        elif field.is_required():
            tree[name] = MISSING
        else:
            tree[name] = list(default) if isinstance(default, tuple) else default
    return tree


def flatten(tree: Mapping[str, Any], leaves: Mapping[str, FieldInfo], prefix: str = "") -> dict[str, Any]:
    """The tree's values by dotted path. A key whose value is a mapping by its schema (kwargs) stays whole."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not holds_mapping(leaves.get(key)):
            flat |= flatten(value, leaves, f"{key}.")
        else:
            flat[key] = value
    return flat


def holds_mapping(field: FieldInfo | None) -> bool:
    return field is not None and get_origin(field.annotation) is dict


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; for dotted names those whose last part is like it, too."""
    names = list(known)
    last = name.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for candidate in names:
        by_last.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    found = [candidate for part in difflib.get_close_matches(last, by_last, count, 0.75) for candidate in by_last[part]]
    found += difflib.get_close_matches(name, names, count, 0.8)
    found.sort(key=lambda candidate: -difflib.SequenceMatcher(None, name, candidate).ratio())
    return list(dict.fromkeys(found))[:count]
