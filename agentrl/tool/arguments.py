"""Validation of a tool's schema, once, and of the arguments that the model sends against it."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs

from agentrl.errors import ConfigError
from agentrl.system.plugin import nearest
from agentrl.tool import ToolSchema

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_FAULTS = 3
_MAX_CHARACTERS = 160
"""Characters of one fault's text: the validator quotes the value, which may be a whole document."""


class ArgumentCheck:
    """Compiled schema: called with arguments, it returns None or a short text about what is wrong with them.

    Arguments that the schema does not name are refused, unless the schema allows them explicitly.
    """

    __slots__ = ("_names", "_validator")

    def __init__(self, schema: ToolSchema) -> None:
        """Compile `schema`.

        Raises ConfigError when it is no OpenAI function schema, or refers to anything outside itself.
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
        self._names = list(parameters.get("properties") or {})
        try:
            strict = {"type": "object", "additionalProperties": False, **parameters}
            self._validator = jsonschema_rs.validator_for(strict, offline=True)
        except ValueError as error:
            raise ConfigError(
                f"tool_schema of {name!r}: function.parameters is no valid JSON schema: {_short(str(error))}"
            ) from error

    def __call__(self, arguments: dict[str, Any]) -> str | None:
        try:
            if self._validator.is_valid(arguments):
                return None
            faults = list(self._validator.iter_errors(arguments))
        except ValueError as error:  # not a JSON value, e.g. a lone surrogate
            return _short(str(error))
        texts = [self._describe(fault) for fault in faults[:_MAX_FAULTS]]
        if len(faults) > _MAX_FAULTS:
            texts.append(f"and {len(faults) - _MAX_FAULTS} more")
        return "; ".join(texts)

    def _describe(self, fault: jsonschema_rs.ValidationError) -> str:
        path = ".".join(map(str, fault.instance_path))
        if isinstance(fault.kind, jsonschema_rs.ValidationErrorKind.AdditionalProperties) and not path:
            unknown = fault.kind.unexpected[0][:64]
            known = ", ".join(self._names) or "none"
            return _short(f"unknown argument {unknown!r}{nearest(unknown, self._names)}; arguments: {known}")
        if isinstance(fault.kind, jsonschema_rs.ValidationErrorKind.Required):
            return _short(f"argument {fault.kind.property!r} is missing" + (f" in {path}" if path else ""))
        return _short(f"{path}: {fault.message}" if path else fault.message)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARACTERS else line[: _MAX_CHARACTERS - 4] + " ..."
