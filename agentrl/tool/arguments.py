"""Validation of a tool's schema, once, and of the arguments that the model sends against it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress

import jsonschema_rs

from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.system.plugin import nearest
from agentrl.tool import Schema, ToolSchema
from agentrl.tool.schema import look_up
from agentrl.tool.work import Unbounded, Work

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_UNKNOWN = (
    jsonschema_rs.ValidationErrorKind.AdditionalProperties,
    jsonschema_rs.ValidationErrorKind.UnevaluatedProperties,
)
_HOLDS_ONE = ("items", "additionalProperties", "contains")
_HOLDS_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
_HOLDS_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of a JSON schema whose value is a schema, a list of them, or several by name."""
_ALTERNATIVES = (jsonschema_rs.ValidationErrorKind.AnyOf, jsonschema_rs.ValidationErrorKind.OneOfNotValid)
_NAMES_MORE = (
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "dependentSchemas"),
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else"),
)
"""Keywords by which an object may have members that its `properties` do not name."""
_MAX_FAULTS = 3
_MAX_CHARACTERS = 160
"""Characters of one fault's text: the validator quotes the value, which may be a whole document."""


def canonical_call(name: str, arguments: JSON) -> str:
    """Write a call such that two calls with the same meaning are the same text.

    The order of members, space around texts, whole numbers written as decimals, and members that are null do not
    matter. Arguments may be JSON text; a text that is no JSON stays as it is.
    """
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return json.dumps([name, _canonical(arguments)], sort_keys=True, ensure_ascii=False)


def _canonical(value: JSON) -> JSON:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _canonical(item) for key, item in value.items() if item is not None}
    return [_canonical(item) for item in value] if isinstance(value, list) else value


class ArgumentCheck:
    """Compiled schema: called with arguments, it returns None or a short text about their error.

    Members that the schema does not name are refused, in nested objects too, unless it allows them explicitly.
    """

    __slots__ = ("_names", "_validator", "_work")

    def __init__(self, schema: ToolSchema | Mapping[str, object]) -> None:
        """Compile `schema`.

        Raises ConfigError when it is no OpenAI function schema, refers to anything outside itself, requires members
        that it does not allow, or has more schemas for one value than `agentrl.tool.work.MOST`.
        """
        function = schema.get("function") if isinstance(schema, dict) else None
        if not isinstance(function, dict) or schema.get("type", "function") != "function":
            raise ConfigError(
                "tool_schema: expected {type: function, function: {name, description, parameters}}, "
                f"found {_short(repr(schema))}"
            )
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"tool_schema: function.name must be 1 to 64 letters, digits, `_`, `-` or `.`, found {name!r}"
            )
        if not isinstance(function.get("description", ""), str):
            raise ConfigError(f"tool_schema of {name!r}: function.description must be a text")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise ConfigError(
                f"tool_schema of {name!r}: function.parameters must be a JSON schema of type object, "
                f"found {_short(repr(parameters))}"
            )
        self._names = list(as_object(parameters.get("properties")))
        try:
            self._work = Work(parameters)
            self._validator = jsonschema_rs.validator_for(closed(parameters), offline=True)
        except RecursionError:
            raise ConfigError(f"tool_schema of {name!r}: function.parameters is nested too deeply") from None
        except _Unmet as error:
            raise ConfigError(f"tool_schema of {name!r}: {error}") from None
        except Unbounded as error:
            raise ConfigError(f"tool_schema of {name!r}: function.parameters: {error}") from None
        except ValueError as error:
            raise ConfigError(
                f"tool_schema of {name!r}: function.parameters is no valid JSON schema: {_short(str(error))}"
            ) from error

    def __call__(self, arguments: Mapping[str, JSON]) -> str | None:
        try:
            if self._validator.is_valid(arguments):
                return None
            if self._work.is_much(arguments):  # To list its faults takes a step for each way through the schema.
                return "the arguments do not match the schema"
            faults = list(self._validator.iter_errors(arguments))
        except ValueError as error:  # not a JSON value, e.g. a lone surrogate
            return _short(str(error))
        faults.sort(
            key=lambda fault: not isinstance(fault.kind, _UNKNOWN)
        )  # a misspelled name is why another is missing
        texts = [self._describe(fault) for fault in faults[:_MAX_FAULTS]]
        if len(faults) > _MAX_FAULTS:
            texts.append(f"and {len(faults) - _MAX_FAULTS} more")
        return "; ".join(texts)

    def _describe(self, fault: jsonschema_rs.ValidationError) -> str:
        fault = _innermost(fault)
        path = ".".join(map(str, fault.instance_path))
        if isinstance(fault.kind, _UNKNOWN):
            unknown = fault.kind.unexpected[0][:64]
            if path:
                return _short(f"unknown argument {unknown!r} in {path}")
            known = ", ".join(self._names) or "none"
            return _short(f"unknown argument {unknown!r}{nearest(unknown, self._names)}; arguments: {known}")
        if isinstance(fault.kind, jsonschema_rs.ValidationErrorKind.Required):
            return _short(f"argument {fault.kind.property!r} is missing" + (f" in {path}" if path else ""))
        return _with_ends(f"{path}: {fault.message}" if path else fault.message)


def closed(parameters: Schema) -> Schema:
    """Add to a schema of arguments that members which it does not name are refused, wherever it names any.

    An object without named members stays open. JSON Schema's own rule is that unnamed members are allowed.
    """
    top: Schema = {"type": "object", **parameters}
    if re.search(r"draft-0?[3-7]", str(parameters.get("$schema"))):  # knows no unevaluatedProperties
        _check_required(top)
        return {"additionalProperties": False, **top}
    return {"unevaluatedProperties": False, **_closed(top, top, {})}


def _closed(schema: Schema, root: Schema, known: dict[int, bool], *, is_part: bool = False) -> Schema:
    """Close the schema of a value. `is_part`: it is combined with others, which may name members of the same object."""
    names = _names_members(schema, root, known)
    is_combined = {"anyOf": is_part or names, "oneOf": is_part or names, "allOf": True}
    # A definition is closed where it is referred to.
    is_combined |= {"$defs": True, "definitions": True}

    def close(key: str, value: JSON) -> JSON:
        return _closed(value, root, known, is_part=is_combined.get(key, False)) if isinstance(value, dict) else value

    out: Schema = {}
    for key, value in schema.items():
        if key in _HOLDS_NAMED:
            out[key] = {name: close(key, member) for name, member in as_object(value).items()}
        elif key in _HOLDS_LIST:
            out[key] = [close(key, item) for item in as_list(value)]
        else:
            out[key] = close(key, value) if key in _HOLDS_ONE else value
    if not names or is_part:
        return out
    out = {"unevaluatedProperties": False, **out}
    _check_required(out)
    return out


class _Unmet(Exception):
    """A schema requires members that it does not allow."""


def _check_required(schema: Schema) -> None:
    """Raise _Unmet for an object's schema that no object can meet, as it requires what it does not name."""
    names, required = as_object(schema.get("properties")), schema.get("required")
    if not names or any(schema.get(key, False) is not False for key in _NAMES_MORE):
        return
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in names:
            raise _Unmet(
                f"`required` has {name!r:.80}{nearest(name, names)}, and `properties` only "
                f"{_short(', '.join(names))}: no call could be right"
            )


def _names_members(schema: Schema, root: Schema, known: dict[int, bool]) -> bool:
    """True when a schema names members of an object, by itself, by its reference or by a part that always holds.

    `known`: the answers by the schemas' `id`, to which this one is added. No schema may lead back to itself.
    """
    if id(schema) not in known:
        parts = [part for part in as_list(schema.get("allOf")) if isinstance(part, dict)]
        if isinstance(reference := schema.get("$ref"), str) and isinstance(named := look_up(reference, root), dict):
            parts.append(named)
        is_named = bool(schema.get("properties"))
        known[id(schema)] = is_named or any(_names_members(part, root, known) for part in parts)
    return known[id(schema)]


def _innermost(fault: jsonschema_rs.ValidationError) -> jsonschema_rs.ValidationError:
    """Find the error within the alternative that a value was meant for: the first whose type it has."""
    while isinstance(fault.kind, _ALTERNATIVES):
        firsts = [faults[0] for faults in fault.kind.context if faults]
        kind, place = jsonschema_rs.ValidationErrorKind.Type, list(fault.instance_path)
        meant = [one for one in firsts if not (isinstance(one.kind, kind) and list(one.instance_path) == place)]
        if not meant:
            break
        fault = meant[0]
    return fault


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARACTERS else line[: _MAX_CHARACTERS - 4] + " ..."


def _with_ends(text: str) -> str:
    """Shorten to one line without its middle: the validator's reason stands after the value that it quotes."""
    line, end = " ".join(text.split()), _MAX_CHARACTERS // 3
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - end - 5]} ... {line[-end:]}"
