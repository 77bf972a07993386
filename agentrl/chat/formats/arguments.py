"""Arguments that a call writes without quotes, read by their JSON schema.

Templates of XML-like call formats write a string as it is and other values as JSON or as Python does (`True`, `None`,
`{'a': 1}`). So text alone does not show the type: `42` may be a string. Reading takes time linear in the text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from agentrl.chat.formats.parsers import Found
from agentrl.chat.message import parse_json
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.tool import Schema, ToolSchema
from agentrl.tool.schema import look_up

MAX_DEPTH = 100
"""Deepest nesting of containers in a Python literal."""


class NoValue(Enum):
    """The type of NO_VALUE."""

    NO_VALUE = auto()


NO_VALUE: Final = NoValue.NO_VALUE
"""Result of a reading that found no value; None is one."""
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_TOKEN = re.compile(
    r"""\s*+(?:([\[\]{}:,])"""
    r"""|'([^'\\]*+(?:\\.[^'\\]*+)*+)'|"([^"\\]*+(?:\\.[^"\\]*+)*+)\""""
    r"""|(-?[0-9][0-9.eE+-]*+)|(True|False|None|true|false|null)\b)""",
    re.DOTALL,
)
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[0-9a-fA-F]{4})"
    r"|U([0-9a-fA-F]{8})|(.))",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "/": "/", "\\": "\\", "'": "'", '"': '"', "\n": ""}


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags around the keys and values of a call's parameters."""

    key_open: str
    key_close: str
    value_open: str
    """Empty: the value begins after `key_close`."""
    value_close: str
    around: str = ""
    """Text that a template writes around each value, inside the tags."""
    said_text: str = ""
    """Text between `key_close` and `value_open` that says that the value is text, for any schema."""
    said_json: tuple[str, ...] = ()
    """Texts there that say that it is JSON."""
    quotes: tuple[str, str] | None = None
    """Marks around a text in which tags stand for themselves."""

    def read(self, name: str, text: str, tools: Sequence[ToolSchema]) -> Found:
        """Read the call of `name` whose parameters are `text`.

        Text between parameters is an error: it may be the rest of a value that holds a closing tag. So is an opening
        tag in a key or a value: the parameter before it may not have been closed.
        """
        root = parameters_of(name, tools)
        schemas, other = as_object(root.get("properties")), root.get("additionalProperties")
        arguments: dict[str, JSON] = {}
        at = 0
        while (begin := text.find(self.key_open, at)) >= 0:
            key, key_end = self._until(text, begin + len(self.key_open), self.key_close)
            _, value_begin = self._until(text, key_end, self.value_open)
            is_quoted = self.quotes is not None and value_begin >= 0 and text.startswith(self.quotes[0], value_begin)
            before, after = self.quotes if self.quotes is not None and is_quoted else ("", "")
            value, end = self._until(text, value_begin + len(before), after + self.value_close)
            if end < 0:
                form = f"{self.key_open}name{self.key_close}{self.value_open}value{self.value_close}"
                return Found(name, error=f"a parameter is not of the form {form}")
            said = text[key_end : value_begin - len(self.value_open)]
            is_said = said == self.said_text != "" or said in self.said_json
            if stray := (text[at:begin] + ("" if is_said else said)).strip():
                return Found(name, error=self._stray(stray))
            if opened := next((tag for tag in self._opening if tag in key or (tag in value and not is_quoted)), None):
                wrong = f"{opened} in the parameter {key[:64]!r}, which is not closed before; a value cannot hold it"
                return Found(name, error=wrong)
            if key in arguments:
                return Found(name, error=f"the parameter {key[:64]!r} is given twice")
            if is_quoted:
                arguments[key], at = value, end
                continue
            value = value.removeprefix(self.around).removesuffix(self.around)
            try:
                if is_said:
                    arguments[key] = value if said == self.said_text else parse_json(value)
                else:
                    arguments[key] = read_argument(value, schemas.get(key, other), root)
            except ValueError as fault:
                return Found(name, error=f"the parameter {key[:64]!r} is not valid JSON: {fault}")
            at = end
        if stray := text[at:].strip():
            return Found(name, error=self._stray(stray))
        return Found(name, arguments)

    @property
    def _opening(self) -> tuple[str, ...]:
        """Tags that open a key or a value."""
        return tuple(filter(None, (self.key_open, self.value_open)))

    @staticmethod
    def _until(text: str, begin: int, tag: str) -> tuple[str, int]:
        """Return the text from `begin` to the next `tag`, and the place after it: -1 where no tag follows."""
        end = text.find(tag, begin) if begin >= 0 else -1
        return ("", -1) if end < 0 else (text[begin:end], end + len(tag))

    def _stray(self, text: str) -> str:
        return f"text outside of parameters, {text[:64]!r}; a value cannot hold {self.value_close}"


def parameters_of(name: str, tools: Sequence[ToolSchema]) -> Schema:
    """Return the schema of a tool's arguments; empty for an unknown tool."""
    functions = (tool["function"] for tool in tools)
    return next((function.get("parameters") or {} for function in functions if function["name"] == name), {})


def read_argument(text: str, schema: JSON, root: Schema) -> JSON:
    """Read `text` as a value of another type, where the schema allows it; else return `text` itself.

    A value that the schema does not allow stays text, too: the check of the arguments then names the expected type.
    `root`: the schema that `$ref`s in `schema` are looked up in.
    """
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    value = read_literal(text)
    if isinstance(value, NoValue | str) or not admits(schema, value, root):
        return text
    return value


def read_literal(text: str) -> JSON | NoValue:
    """Read JSON, or a Python literal made of dict, list, str, int, float, bool and None; else return NO_VALUE."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    value: JSON | NoValue
    try:
        value = parse_json(text)
    except ValueError:
        try:
            value, end = literal_at(text, 0) if text[:1] in ("[", "{") else (NO_VALUE, len(text))
        except ValueError:
            return NO_VALUE
        if text[end:]:
            return NO_VALUE
    return value if value is NO_VALUE or _HALF_PAIR.search(text) is None or _is_text(value) else NO_VALUE


def _is_text(value: JSON) -> bool:
    """Check whether all text in a value has a form in UTF-8, which half of a surrogate pair has not."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def literal_at(text: str, at: int) -> tuple[JSON, int]:
    """Read the literal that begins at a character, and find its end.

    A literal is a list, dict, text or number as `repr` or JSON writes it, or a word of either. Raises ValueError for
    anything else.
    """
    builder = LiteralBuilder()
    while not builder.is_whole:
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"no literal at character {at}")
        at = token.end()
        mark, single, double, number, word = token.groups()
        if mark is not None:
            builder.mark(mark, at)
        else:
            string = single if single is not None else double
            if string is not None:
                builder.add(_ESCAPE.sub(_unescape, string) if "\\" in string else string, at)
            else:
                builder.add(_WORDS[word] if number is None else parse_json(number), at)
    return builder.value(), at


class LiteralBuilder:
    """Builds a value from the tokens of a literal; containers that are still open lie on a stack.

    `at` is the character after the token, for messages; each method raises ValueError for a token in a wrong place.
    """

    def __init__(self) -> None:
        self._containers: list[tuple[str, list[JSON]]] = [("", [])]
        """The open containers: the mark that closes each, and its items; of a dict, keys and values in turn."""
        self._complete = False
        """A value has just ended, so that a separator or a closing mark must follow."""

    @property
    def is_whole(self) -> bool:
        """True when a value has begun and ended."""
        return self._complete and len(self._containers) == 1

    @property
    def expects_key(self) -> bool:
        """True where a scalar would be the key of an object."""
        closing, items = self._containers[-1]
        return closing == "}" and len(items) % 2 == 0

    def mark(self, mark: str, at: int) -> None:
        """Take a bracket, a brace, "," or ":"."""
        if mark in ("]", "}"):
            self._close(mark, at)
        elif mark in (",", ":"):
            closing, _ = self._containers[-1]
            if not self._complete or not closing or (mark == ":") != self._after_key():
                raise ValueError(f"{mark} at character {at}")
            self._complete = False
        else:
            self._expect_value(at)
            self._containers.append(("]" if mark == "[" else "}", []))

    def add(self, value: JSON, at: int) -> None:
        """Add a scalar to the innermost container."""
        self._expect_value(at)
        self._containers[-1][1].append(value)
        self._complete = True

    def _close(self, mark: str, at: int) -> None:
        closing, items = self._containers[-1]
        # An empty container may close at once; any other only after a value, so a comma before it is refused.
        if mark != closing or self._after_key() or self._complete != bool(items):
            raise ValueError(f"{mark} at character {at}")
        self._containers.pop()
        self._containers[-1][1].append(items if mark == "]" else _dict(items))
        self._complete = True

    def value(self) -> JSON:
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


def _dict(items: list[JSON]) -> dict[str, JSON]:
    keys = [key for key in items[::2] if isinstance(key, str)]
    if len(keys) < len(items[::2]):
        raise ValueError("a key is no string")
    if len(set(keys)) < len(keys):
        raise ValueError("a key is given twice")
    return dict(zip(keys, items[1::2], strict=True))


def _unescape(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if not code:
        return _ESCAPED.get(escape[4], escape[0])
    high, pair, low = code.partition("\\u")
    point = int(high, 16) if not pair else 0x10000 + (int(high, 16) - 0xD800) * 0x400 + int(low, 16) - 0xDC00
    if point > sys.maxunicode or 0xD800 <= point < 0xE000:  # a half of a surrogate pair could not be encoded later
        raise ValueError(f"{escape[0]} is no character")
    return chr(point)


def admits(schema: JSON, value: JSON, root: Schema, known: dict[int, bool] | None = None) -> bool:
    """True when the schema allows a value of this type. Only enum and const are checked among its other rules.

    `root`: the schema that `$ref`s are looked up in. `known`: the answers for this value by the schemas' `id`, so that
    each is asked once, however many references lead to it.
    """
    if not isinstance(schema, dict):
        return schema is not False
    known = {} if known is None else known
    if id(schema) not in known:
        known[id(schema)] = True  # A reference that leads back to itself adds no rule.
        known[id(schema)] = _admits(schema, value, root, known)
    return known[id(schema)]


def _admits(schema: Schema, value: JSON, root: Schema, known: dict[int, bool]) -> bool:
    reference = schema.get("$ref")
    if isinstance(reference, str) and not admits(look_up(reference, root), value, root, known):
        return False
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else as_list(kinds)
    if kinds is not None and not any(_is_kind(value, kind) for kind in named):
        return False
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is not None and not any(_same(value, member) for member in as_list(listed)):
        return False
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        options = as_list(schema.get(key))
        if options and not enough(admits(option, value, root, known) for option in options):
            return False
    return True


def _is_kind(value: JSON, kind: JSON) -> bool:
    if kind == "integer":  # JSON Schema counts 3.0 as one.
        return _json_type(value) == "integer" or (isinstance(value, float) and value.is_integer())
    return _json_type(value) == kind or (kind == "number" and _json_type(value) == "integer")


def _same(value: JSON, member: JSON) -> bool:
    """Equality in which True is not 1."""
    return value == member and isinstance(value, bool) == isinstance(member, bool)


def _json_type(value: JSON) -> str:
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", str: "string"}
    return names.get(type(value), "null")
