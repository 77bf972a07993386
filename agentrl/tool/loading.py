"""Construction of tools from the entries of a YAML: a class with a config and perhaps a schema, or a function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import pydantic

from agentrl.config.dialect import translated
from agentrl.errors import ConfigError
from agentrl.system.call_journal import RENAMED
from agentrl.system.cassette import Cassette
from agentrl.system.entries import Entry
from agentrl.system.json_value import JSON
from agentrl.system.plugin import describe, nearest
from agentrl.tool import CALL_KEYS, FunctionTool, Tool, ToolResponse, ToolSchema, ToolSource
from agentrl.tool.arguments import ArgumentCheck


def tools_of_entry(
    entry: Entry, cassette: Cassette | None = None, options: Mapping[str, Mapping[str, JSON]] = {}
) -> list[Tool]:
    """Make the tools of one entry of a tool YAML, mostly one.

    `options` are keys of `config` in place of the entry's, by the tool's name. Tools of a source come from the cassette
    while one is replayed. Raises ConfigError naming file and entry.
    """
    entry = translated(entry).renamed(RENAMED)
    if "mcp" in entry.values:
        mcp = entry.mapping("mcp")
        file, tools = mcp.get("mcp_servers_config_path", "FILE.json"), mcp.get("tool_selected_list")
        chosen = f", tools: [{', '.join(map(str, tools))}]" if isinstance(tools, list) and tools else ""
        spelling = f"`class_name: tools.mcp.MCPTools` and `config: {{servers_file: {file}{chosen}}}`"
        raise entry.error(f"`mcp` is not a key here; the tools of MCP servers are named by {spelling}")
    if ("class_name" in entry.values) == ("function" in entry.values):
        raise entry.error("expected exactly one of `class_name` (a tool class) and `function` (a plain function)")
    config = entry.mapping("config")
    if "function" in entry.values:
        entry.check_keys(("function", "config"))
        function = entry.load(entry.text("function"))
        try:
            name = tool_of_function(function, {}).name
            return [tool_of_function(function, {**config, **options.get(name, {})})]
        except ConfigError as error:
            raise entry.error(str(error)) from error
    entry.check_keys(("class_name", "config", "tool_schema"))
    tool_class = entry.load(entry.text("class_name"), (Tool, ToolSource))
    schema = entry.mapping("tool_schema") or None
    if issubclass(tool_class, ToolSource):
        if schema is not None:
            raise entry.error("`tool_schema`: this class brings several tools, each with its own schema")
        return _made(entry, tool_class, lambda: _tools_of_source(tool_class, entry, cassette))
    if schema is not None:
        try:
            ArgumentCheck(schema)
        except ConfigError as error:
            raise entry.error(str(error)) from error
    shown = cast(ToolSchema | None, schema) or tool_class.default_schema
    config |= {} if shown is None else options.get(shown["function"]["name"], {})
    return _made(entry, tool_class, lambda: [tool_class(config, cast(ToolSchema | None, schema))])


def _made(entry: Entry, tool_class: type[Tool] | type[ToolSource], make: Callable[[], list[Tool]]) -> list[Tool]:
    try:
        return make()
    except pydantic.ValidationError as error:
        own_keys = tool_class.config_model.model_fields if tool_class.config_model else ()
        raise entry.error(f"config: {describe(error, [*CALL_KEYS, *own_keys])}") from error
    except ConfigError as error:
        raise entry.error(str(error)) from error
    except Exception as error:
        raise entry.error(f"cannot be made: {type(error).__name__}: {error}") from error


def _tools_of_source(source: type[ToolSource], entry: Entry, cassette: Cassette | None) -> list[Tool]:
    config = entry.mapping("config")
    place = f"{entry.key}[{entry.index}] ({entry.text('class_name')})"
    if cassette is not None and cassette.mode == "replay":
        return [_ReplayedTool(config, cast(ToolSchema, schema), kept) for schema, kept in cassette.replay_source(place)]
    tools = source(config).tools()
    if cassette is not None:
        cassette.record_source(place, [(dict(tool.schema), tool.is_stateful) for tool in tools])
    return tools


class _ReplayedTool(Tool):
    """Stand-in for a source's tool whose answers are on the cassette."""

    def __init__(self, config: dict[str, Any], schema: ToolSchema, is_stateful: bool) -> None:
        super().__init__(config, schema)
        self._is_stateful = is_stateful

    @property
    def is_stateful(self) -> bool:
        return self._is_stateful

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        raise RuntimeError(f"tool {self.name} is replayed, and cannot be asked")


def tool_of_function(function: object, config: dict[str, Any]) -> FunctionTool:
    """Make a tool of a plain or `@tool`-decorated function and its config. Raises ConfigError."""
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
