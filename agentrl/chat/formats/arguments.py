"""Arguments that a call writes without quotes, read by their JSON schema.

Templates of XML-like call formats write a string as it is and other values as JSON or as Python does (`True`, `None`,
`{'a': 1}`), so text alone does not say which it is: `42` may be a string. Reading takes time linear in the text.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from agentrl.chat.formats.parsers import Found
from agentrl.chat.message import parse_json
from agentrl.tool import ToolSchema

MAX_DEPTH = 100
"""Deepest nesting of containers in a Python literal."""
NO_VALUE: Any = object()
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_TOKEN = re.compile(
    r"""\s*+(?:([\[\]{}:,])"""
    r"""|'([^'\\]*+(?:\\.[^'\\]*+)*+)'|"([^"\\]*+(?:\\.[^"\\]*+)*+)\""""
    r"""|(-?[0-9][0-9.eE+-]*+)|(True|False|None|true|false|null)\b)""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "/": "/", "\\": "\\", "'": "'", '"': '"', "\n": ""}


def tagged_call(name: str, text: str, tags: tuple[str, str, str], tools: Sequence[ToolSchema]) -> Found:
    """Read a call of `name` whose parameters stand between tags.

    `tags`: what stands before a key, behind it, and around a value, where a template writes it.
    """
    opening, opened, around = tags
    read = ArgumentReader(name, tools)
    arguments: dict[str, Any] = {}
    at = 0
    while (at := text.find(opening, at)) >= 0:
        key_end = text.find(opened, at + len(opening))
        end = text.find("</parameter>", at)
        if not at < key_end < end:
            return Found(name, error=f"a parameter is not of the form {opening}name{opened}value</parameter>")
        key, value = text[at + len(opening) : key_end], text[key_end + len(opened) : end]
        arguments[key] = read(key, value.removeprefix(around).removesuffix(around))
        at = end
    return Found(name, arguments)


class ArgumentReader:
    """Reads the unquoted arguments of one function's calls."""

    def __init__(self, name: str, tools: Sequence[ToolSchema]) -> None:
        functions = (tool.get("function", tool) for tool in tools)
        self._parameters = next((f.get("parameters") or {} for f in functions if f.get("name") == name), {})
        self._properties = self._parameters.get("properties") or {}

    def __call__(self, key: str, text: str) -> Any:
        schema = self._properties.get(key, self._parameters.get("additionalProperties"))
        return read_argument(text, schema, self._parameters)


def read_argument(text: str, schema: Any, root: Any) -> Any:
    """Read `text` as a value of another type, where the schema allows it; else return `text` itself.

    A value that the schema does not allow stays text, too: the check of the arguments then says what was expected.
    `root`: the schema that `$ref`s in `schema` are looked up in.
    """
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    value = read_literal(text)
    return text if value is NO_VALUE or isinstance(value, str) or not admits(schema, value, root) else value


def read_literal(text: str) -> Any:
    """Read JSON, or a Python literal made of dict, list, str, int, float, bool and None; else return NO_VALUE."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = parse_json(text)
    except ValueError:
        try:
            value = _python_literal(text) if text[:1] in ("[", "{") else NO_VALUE
        except ValueError:
            return NO_VALUE
    return NO_VALUE if isinstance(value, float) and not math.isfinite(value) else value


def _python_literal(text: str) -> Any:
    """Read a list or dict as `repr` writes it, JSON's words allowed. Raises ValueError for anything else."""
    builder = _LiteralBuilder()
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"no literal at character {at}")
        at = token.end()
        mark, single, double, number, word = token.groups()
        if mark in ("]", "}"):
            builder.close(mark, at)
        elif mark in (",", ":"):
            builder.separate(mark, at)
        elif mark is not None:
            builder.open(mark, at)
        else:
            builder.add(_scalar(single if single is not None else double, number, word), at)
    return builder.value()


class _LiteralBuilder:
    """Builds a value from the tokens of a Python literal; containers that are still open lie on a stack.

    `at` is the character behind the token, for messages; each method raises ValueError for a token in a wrong place.
    """

    def __init__(self) -> None:
        self._containers: list[tuple[str, list[Any]]] = [("", [])]
        """The open containers: the mark that closes each, and its items; of a dict, keys and values in turn."""
        self._complete = False
        """A value has just ended, so that a separator or a closing mark must follow."""

    def open(self, mark: str, at: int) -> None:
        """Begin a container with "[" or "{"."""
        self._expect_value(at)
        self._containers.append(("]" if mark == "[" else "}", []))

    def add(self, value: Any, at: int) -> None:
        """Add a scalar to the innermost container."""
        self._expect_value(at)
        self._containers[-1][1].append(value)
        self._complete = True

    def separate(self, mark: str, at: int) -> None:
        """Take "," between items, or ":" between key and value."""
        closing, _ = self._containers[-1]
        if not self._complete or not closing or (mark == ":") != self._after_key():
            raise ValueError(f"{mark} at character {at}")
        self._complete = False

    def close(self, mark: str, at: int) -> None:
        """End the innermost container with "]" or "}"."""
        closing, items = self._containers[-1]
        # An empty container may close at once; any other only behind a value, so a comma before it is refused.
        if mark != closing or self._after_key() or self._complete != bool(items):
            raise ValueError(f"{mark} at character {at}")
        self._containers.pop()
        self._containers[-1][1].append(items if mark == "]" else _dict(items))
        self._complete = True

    def value(self) -> Any:
        """Return the finished value. Raises ValueError when containers are still open, or there is nothing."""
        if len(self._containers) > 1 or len(self._containers[0][1]) != 1:
            raise ValueError("not closed")
        return self._containers[0][1][0]

    def _after_key(self) -> bool:
        closing, items = self._containers[-1]
        return closing == "}" and len(items) % 2 == 1

    def _expect_value(self, at: int) -> None:
        if self._complete or len(self._containers) > MAX_DEPTH:
            raise ValueError(f"no separator before character {at}, or nested too deeply")


def _dict(items: list[Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in items[::2]):
        raise ValueError("a key is no string")
    return dict(zip(items[::2], items[1::2], strict=True))


def _scalar(string: str | None, number: str | None, word: str) -> Any:
    if string is not None:
        return _ESCAPE.sub(_unescape, string) if "\\" in string else string
    if number is None:
        return _WORDS[word]
    value = parse_json(number)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


def _unescape(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if not code:
        return _ESCAPED.get(escape[4], escape[0])
    point = int(code, 16)
    if point > sys.maxunicode or 0xD800 <= point < 0xE000:  # a half of a surrogate pair could not be encoded later
        raise ValueError(f"{escape[0]} is no character")
    return chr(point)


def admits(schema: Any, value: Any, root: Any, seen: frozenset[str] = frozenset()) -> bool:
    """True when the schema allows a value of this type. Of its other rules only enum and const are checked.

    `root`: the schema that `$ref`s are looked up in. `seen`: references on the way here, each followed once.
    """
    if not isinstance(schema, dict):
        return schema is not False
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen = seen | {reference}
        if not admits(look_up(reference, root), value, root, seen):
            return False
    return _admits_type(schema, value) and _admits_value(schema, value) and _admits_choice(schema, value, root, seen)


def _admits_type(schema: dict[str, Any], value: Any) -> bool:
    kinds = schema.get("type")
    return kinds is None or any(_is_kind(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _admits_value(schema: dict[str, Any], value: Any) -> bool:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed is None or any(_same(value, member) for member in listed)


def _admits_choice(schema: dict[str, Any], value: Any, root: Any, seen: frozenset[str]) -> bool:
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        options = schema.get(key)
        if options and not enough(admits(option, value, root, seen) for option in options):
            return False
    return True


def resolved(schema: Any, root: Any) -> Any:
    """Merge the schema that the `$ref` of `schema` names into it."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        named = look_up(schema["$ref"], root)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**named, **rest} if isinstance(named, dict) else named
    return schema


def look_up(reference: str, root: Any) -> Any:
    """Look up a `$ref` within the schema `root`. True, the schema that allows everything, where there is none."""
    found = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference.strip("#/") else ():
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or part not in found:
            return True
        found = found[part]
    return found


def _is_kind(value: Any, kind: Any) -> bool:
    if kind == "integer":  # JSON Schema counts 3.0 as one.
        return _json_type(value) == "integer" or (isinstance(value, float) and value.is_integer())
    return _json_type(value) == kind or (kind == "number" and _json_type(value) == "integer")


def _same(value: Any, member: Any) -> bool:
    """Equality in which True is not 1."""
    return value == member and isinstance(value, bool) == isinstance(member, bool)


def _json_type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", str: "string"}
    return names.get(type(value), "null")
