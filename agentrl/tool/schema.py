"""Types of tool schemas, and the schemas and argument models of plain Python functions.

Types come from the hints (through pydantic: Annotated, Field, Literal, nested models), texts from the docstring (Google
or Sphinx style) or from `Field(description=...)`, which wins.
"""

from __future__ import annotations

import inspect
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict
from urllib.parse import unquote

import pydantic

from agentrl.system.json_value import JSON, as_object

Schema: TypeAlias = dict[str, JSON]
"""A JSON schema."""


class FunctionSchema(TypedDict):
    """Name, description and JSON schema of the parameters of a function."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[Schema]


class ToolSchema(TypedDict):
    """An OpenAI function schema, as the model is shown it."""

    type: NotRequired[str]
    function: FunctionSchema


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?|Warnings?):\s*$")
_PARAMETER_SECTIONS = ("Args", "Arguments", "Parameters")
_GOOGLE = re.compile(r"^(\*{0,2}\w+)\s*(?:\(.*?\))?\s*:\s*(.*)$")
_SPHINX = re.compile(r"^:(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")
_SPHINX_OTHER = re.compile(r"^:\w+[^:]*:")


def arguments_model(function: Callable[..., object]) -> type[pydantic.BaseModel]:
    """Make a pydantic model whose fields are the function's parameters.

    Raises TypeError when a parameter cannot be given by name, has no type hint, or has a hint that has no schema.
    """
    name = function_name(function)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"{name}: a type hint cannot be resolved: {error}") from error
    _, texts = parse_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}: parameter `{parameter}` cannot be given by name; a tool's parameters must be")
        if parameter.name not in hints:
            raise TypeError(f"{name}: parameter `{parameter.name}` has no type hint, like `{parameter.name}: str`")
        hint = hints[parameter.name]
        if (text := texts.get(parameter.name)) is not None:
            metadata = getattr(hint, "__metadata__", ())  # after the docstring's text: the hint's own wins
            hint = Annotated[(hint.__origin__ if metadata else hint, pydantic.Field(description=text), *metadata)]
        fields[parameter.name] = (hint, ... if parameter.default is parameter.empty else parameter.default)
    config = pydantic.ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=False)
    try:
        with warnings.catch_warnings():
            # A parameter may be called `json` or `copy` like a method of the model: its value is read from __dict__.
            warnings.filterwarnings("ignore", message='Field name ".*" .*shadows an attribute')
            return pydantic.create_model(name, __config__=config, **fields)
    except (pydantic.errors.PydanticUserError, NameError) as error:
        raise TypeError(f"{name}: no schema can be made of its parameters: {error}") from error


def function_name(function: Callable[..., object]) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return str(getattr(function, "__name__", type(function).__name__))


def parameters_of(schema: ToolSchema) -> dict[str, JSON]:
    """Return the JSON schemas of the tool's parameters, by name."""
    return as_object(as_object(schema["function"].get("parameters")).get("properties"))


def resolved(schema: JSON, root: Schema) -> JSON:
    """Merge the schema that the `$ref` of `schema` names into it."""
    if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        named = look_up(reference, root)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**named, **rest} if isinstance(named, dict) else named
    return schema


def look_up(reference: str, root: Schema) -> JSON:
    """Look up a `$ref` within the schema `root`. True, the schema that allows everything, if it is missing."""
    try:
        return pointed_at(reference, root)
    except LookupError:
        return True


def pointed_at(reference: str, root: Schema) -> JSON:
    """Follow a `$ref` that is a JSON pointer (RFC 6901) into `root`. Raises LookupError."""
    head, _, pointer = reference.partition("#")
    if head or (pointer and not pointer.startswith("/")):
        raise LookupError(reference)
    found: JSON = root
    for part in unquote(pointer).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isascii() and part.isdecimal():
            found = found[int(part)]
        elif isinstance(found, dict):
            found = found[part]
        else:
            raise LookupError(reference)
    return found


def parameters_schema(model: type[pydantic.BaseModel]) -> Schema:
    """Return the model's JSON schema without titles, its definitions inlined.

    Raises TypeError for a recursive type, which cannot be inlined, and for a type without a JSON schema.
    """
    try:
        schema = model.model_json_schema()
    except pydantic.errors.PydanticInvalidForJsonSchema as error:
        raise TypeError(f"{model.__name__}: no JSON schema: {error.message}") from error
    definitions = schema.pop("$defs", {})
    cleaned = _cleaned(schema, definitions, ())
    cleaned.setdefault("properties", {})
    # The validator refuses unknown arguments without being told so; the model's prompt stays shorter.
    cleaned.pop("additionalProperties", None)
    return {"type": cleaned.pop("type"), "properties": cleaned.pop("properties"), **cleaned}


def _clean(node: JSON, definitions: Mapping[str, Schema], inside: tuple[str, ...]) -> JSON:
    if isinstance(node, list):
        return [_clean(item, definitions, inside) for item in node]
    return _cleaned(node, definitions, inside) if isinstance(node, dict) else node


def _cleaned(node: Schema, definitions: Mapping[str, Schema], inside: tuple[str, ...]) -> Schema:
    if "$ref" in node:
        name = str(node["$ref"]).removeprefix("#/$defs/")
        if name in inside:
            raise TypeError(f"the type {name} contains itself; a tool's schema cannot be recursive")
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return _cleaned({**definitions[name], **rest}, definitions, (*inside, name))
    out: Schema = {}
    for key, value in node.items():
        if key == "properties" and isinstance(value, dict):
            out[key] = {name: _clean(item, definitions, inside) for name, item in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            out[key] = value
        elif key != "title" or not isinstance(value, str):
            out[key] = _clean(value, definitions, inside)
    out.pop("discriminator", None)  # it refers to the definitions that are inlined
    return out


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google- or Sphinx-style docstring, cleaned by inspect.getdoc: (description, {parameter: description})."""
    reader = _DocstringReader()
    for line in text.splitlines():
        reader.read(line)
    described = {name: value for name, value in reader.parameters.items() if value}
    return "\n".join(reader.description).strip(), described


class _DocstringReader:
    """Line by line: the section that the next line belongs to, and the parameter whose text it may continue."""

    def __init__(self) -> None:
        self.description: list[str] = []
        self.parameters: dict[str, str] = {}
        self._section = ""
        """Google's heading, ":param" or ":other" for a field of Sphinx, "" in the description."""
        self._parameter = ""
        self._indent = 0
        """Indentation of the parameter's name, in Google's style."""

    def read(self, line: str) -> None:
        stripped = line.strip()
        if match := _SECTION.match(line):
            self._section, self._parameter = match[1], ""
        elif match := _SPHINX.match(stripped):
            self._section, self._parameter = ":param", match[1]
            self.parameters[match[1]] = match[2]
        elif _SPHINX_OTHER.match(stripped):
            self._section, self._parameter = ":other", ""
        elif not self._section:
            self.description.append(stripped)
        elif stripped and self._section == ":param":
            self._continue(stripped)
        elif stripped and self._section in _PARAMETER_SECTIONS:
            self._read_google(stripped, len(line) - len(line.lstrip()))

    def _read_google(self, stripped: str, depth: int) -> None:
        match = _GOOGLE.match(stripped)
        if match and (not self._parameter or depth <= self._indent):
            self._parameter, self._indent = match[1].lstrip("*"), depth
            self.parameters[self._parameter] = match[2]
        elif depth == 0:
            self._section, self._parameter = "", ""
            self.description.append(stripped)
        elif self._parameter:
            self._continue(stripped)

    def _continue(self, text: str) -> None:
        self.parameters[self._parameter] = f"{self.parameters[self._parameter]} {text}".strip()
