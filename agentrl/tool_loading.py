"""Tools made from what a YAML names: a class with a config and perhaps a schema, or a function."""

from __future__ import annotations

import copy
from typing import Any

import pydantic

from agentrl.errors import ConfigError
from agentrl.plugin import Entry, describe, nearest
from agentrl.tool import CALL_KEYS, FunctionTool, Tool
from agentrl.tool_arguments import ArgumentCheck


def tool_of_entry(entry: Entry) -> Tool:
    """The tool of one entry of a tool YAML. Raises ConfigError naming file and entry."""
    if ("class_name" in entry.values) == ("function" in entry.values):
        raise entry.error("expected exactly one of `class_name` (a tool class) and `function` (a plain function)")
    config = entry.mapping("config")
    if "function" in entry.values:
        entry.check_keys(("function", "config"))
        function = entry.load(entry.text("function"))
        try:
            return tool_of_function(function, config)
        except ConfigError as error:
            raise entry.error(str(error)) from error
    entry.check_keys(("class_name", "config", "tool_schema"))
    tool_class = entry.load(entry.text("class_name"), Tool)
    schema = entry.mapping("tool_schema") or None
    if schema is not None:
        try:
            ArgumentCheck(schema)
        except ConfigError as error:
            raise entry.error(str(error)) from error
    try:
        tool = tool_class(config, schema)
    except pydantic.ValidationError as error:
        own_keys = tool_class.config_model.model_fields if tool_class.config_model else ()
        raise entry.error(f"config: {describe(error, [*CALL_KEYS, *own_keys])}") from error
    except ConfigError as error:
        raise entry.error(str(error)) from error
    except Exception as error:
        raise entry.error(f"cannot be made: {type(error).__name__}: {error}") from error
    assert isinstance(tool, Tool)
    return tool


def tool_of_function(function: Any, config: dict[str, Any]) -> FunctionTool:
    """A plain or `@tool`-decorated function with its config. Raises ConfigError."""
    if isinstance(function, FunctionTool):
        made = copy.copy(function)
        made.config = {**function.config, **config}
    elif not callable(function) or isinstance(function, type):
        raise ConfigError(f"expected a function, found {function!r}; a tool class is named by `class_name`")
    else:
        try:
            made = FunctionTool(function, config)
        except TypeError as error:
            raise ConfigError(str(error)) from error
    if made.own_config:
        key = next(iter(made.own_config))
        raise ConfigError(
            f"config: unknown key {key!r}{nearest(key, CALL_KEYS)}; known keys are {', '.join(sorted(CALL_KEYS))}"
        )
    return made
