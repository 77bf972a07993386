"""The keys of a schema: their dotted paths, defaults and nearest neighbours."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from agentrl.config.rules import Rule
from agentrl.config.section import Section
from agentrl.system.json_value import JSON

MISSING = "???"
"""OmegaConf's mark of a value that must be given."""
OTHER_NAMES = {"max_new_tokens": "data.max_response_length", "max_tokens": "data.max_response_length"}
"""Keys by other libraries' names of them, which are spelled too differently to be found."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a schema, with its rules."""

    field: FieldInfo
    rules: tuple[tuple[Rule, str], ...]
    """Its own rules and the rules of the sections around it, outermost first, each with the path of the section that
    declares it."""


def all_keys(schema: type[Section], section: str = "", rules: tuple[tuple[Rule, str], ...] = ()) -> dict[str, Key]:
    """Map the dotted path of every key of the schema to the key."""
    found: dict[str, Key] = {}
    for name, field in schema.model_fields.items():
        path = f"{section}.{name}" if section else name
        declared = (*rules, *((rule, section) for rule in field.metadata if isinstance(rule, Rule)))
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found |= all_keys(inner, path, declared)
        else:
            found[path] = Key(field, declared)
    return found


def entry_of(annotation: object) -> type[Section] | None:
    """Return the class of a mapping's values, where it is a section."""
    last = get_args(annotation)[-1] if get_origin(annotation) is dict else None
    return last if isinstance(last, type) and issubclass(last, Section) else None


@functools.cache  # asked once for each override
def leaf_keys(schema: type[Section]) -> Mapping[str, FieldInfo]:
    """Map the dotted path of every key of the schema to its field."""
    return {path: key.field for path, key in all_keys(schema).items()}


def defaults(schema: type[Section]) -> dict[str, JSON]:
    """Return the schema's defaults as a tree of plain values; `???` where a value must be given."""
    tree: dict[str, JSON] = {}
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


def flatten(tree: Mapping[str, JSON], leaves: Mapping[str, FieldInfo], prefix: str = "") -> dict[str, JSON]:
    """Flatten a tree to values by dotted path. A key whose value is a mapping by its schema (kwargs) stays whole."""
    flat: dict[str, JSON] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_kwargs = key in leaves and get_origin(leaves[key].annotation) is dict
        if isinstance(value, Mapping) and value and not is_kwargs:
            flat |= flatten(value, leaves, f"{key}.")
        else:
            flat[key] = value
    return flat


def nested(flat: Mapping[str, JSON]) -> dict[str, JSON]:
    """Build the tree of values by dotted path; the inverse of `flatten`."""
    tree: dict[str, JSON] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            below = inner.setdefault(section, {})
            assert isinstance(below, dict)
            inner = below
        inner[name] = value
    return tree


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Find the known names most like `name`, best first: by the likeness of the last part, then of the whole name."""
    names = list(known)
    last = name.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for candidate in names:
        by_last.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    found = [candidate for part in difflib.get_close_matches(last, by_last, count, 0.75) for candidate in by_last[part]]
    found += difflib.get_close_matches(name, names, count, 0.8)

    def likeness(candidate: str) -> tuple[float, float]:
        parts = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2])
        return parts.ratio(), difflib.SequenceMatcher(None, name, candidate).ratio()

    found.sort(key=likeness, reverse=True)
    return list(dict.fromkeys(found))[:count]


def differing(config: Section) -> dict[str, tuple[JSON, JSON]]:
    """Find the keys that are not at their defaults: (value, default) of each."""
    leaves = leaf_keys(type(config))
    default = flatten(defaults(type(config)), leaves)
    values = flatten(config.model_dump(mode="json"), leaves)
    return {key: (value, default[key]) for key, value in values.items() if value != default[key]}


def unknown_keys(strangers: Collection[str], known: list[str]) -> str:
    """Write the message for keys that do not exist."""
    lines = []
    for key in strangers:
        near = [one for one in nearest(key, known) if one != key]  # dialects have keys in places where they do nothing
        if (other := OTHER_NAMES.get(key.rpartition(".")[2])) in known:
            near = [str(other)]
        lines.append(f"unknown key {key}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return "\n".join(lines) + ("\n(--cfg job prints all keys)" if not all("?" in line for line in lines) else "")
