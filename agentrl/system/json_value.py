"""Type of JSON values that are written, or taken apart by their type; the texts in them changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
T = TypeVar("T")


def as_object(value: JSON) -> dict[str, JSON]:
    """Return `value` where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: JSON) -> list[JSON]:
    """Return `value` where it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else []


def as_mapping(value: JSON) -> Mapping[str, JSON]:
    """Return a value that can only be a mapping, as one. Raises TypeError when it is no mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a mapping, found {value!r:.200}")
    return value


def map_texts(value: T, change: Callable[[str], str]) -> T:
    """Copy a value as JSON has it, with every text in it changed, keys included. Tuples become lists."""
    return cast(T, _mapped(value, change))


def _mapped(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
