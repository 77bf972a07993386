"""Tools of OpenAI's Responses: a client's declarations, and the functions that stand for them.

The policy knows functions alone. A namespace's tools are functions whose names begin with the namespace's, and a tool
that a client runs by its kind is a function of that name. A call goes back in the form of its declaration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Tag

from agentrl.chat.message import parse_json
from agentrl.openai_api.dialect import Offered, function
from agentrl.openai_api.fields import PROVIDER
from agentrl.openai_api.request import Name, Schema
from agentrl.openai_api.wire import DROPPED, Dropped, Listed, Wire, is_sendable, tagged

FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of the function that stands for a tool of the type `custom`, whose input is text."""


class Tool(Wire):
    """Tool declaration; one of the type `custom` takes text."""

    apis, place = "responses", "tool"
    type: Literal["function", "custom"]
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    defer_loading: bool | None = None


class KindTool(Wire):
    """Tool that a client runs, whose kind stands for its name; the declaration of a search has its own texts."""

    apis, place = "responses", "tool"
    type: Literal["tool_search", "local_shell", "shell", "apply_patch"]
    execution: str | None = None
    description: str | None = None
    parameters: Schema | None = None


class DroppedTool(Dropped):
    """Tool of a kind that is left out."""

    place = "tool.type"


Inner = Annotated[
    Annotated[Tool, Tag(":tool")] | Annotated[DroppedTool, Tag(DROPPED)],
    tagged("responses", "tool.type", tool="function custom"),
]


class Namespace(Wire):
    """Tools under one name."""

    apis, place = "responses", "tool"
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Listed[Inner]


AnyTool = Annotated[
    Annotated[Tool, Tag(":tool")]
    | Annotated[Namespace, Tag(":namespace")]
    | Annotated[KindTool, Tag(":kind")]
    | Annotated[DroppedTool, Tag(DROPPED)],
    tagged(
        "responses",
        "tool.type",
        tool="function custom",
        namespace="namespace",
        kind="tool_search local_shell shell apply_patch",
    ),
]


@dataclass(frozen=True, slots=True)
class Kind:
    """Tool whose kind stands for its name, and the member of a call that holds its arguments."""

    description: str
    parameters: dict[str, object]
    member: str
    within: Mapping[str, object] = field(default_factory=dict)
    """Members next to the arguments."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Members of a call besides."""


def _parameters(*required: str, **properties: object) -> dict[str, object]:
    texts = {name: value if isinstance(value, dict) else {"type": value} for name, value in properties.items()}
    return {"type": "object", "properties": texts, "required": list(required)}


_TEXTS = {"type": "array", "items": {"type": "string"}}
KINDS = {
    "tool_search": Kind(
        "Find tools by what they do.", _parameters("query", query="string"), "arguments", more={"execution": "client"}
    ),
    "local_shell": Kind(
        "Run a program with its arguments.",
        _parameters("command", command=_TEXTS, working_directory="string", timeout_ms="integer"),
        "action",
        {"type": "exec", "env": {}},
    ),
    "shell": Kind(
        "Run commands in a shell, one after another.",
        _parameters("commands", commands=_TEXTS, timeout_ms="integer", max_output_length="integer"),
        "action",
    ),
    "apply_patch": Kind(
        "Create, change or delete a file by a diff.",
        _parameters(
            "type",
            "path",
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path="string",
            diff="string",
        ),
        "operation",
    ),
}
"""Tools that a client runs, by kind, for the policy, which never learnt them."""
PLAIN = "functions"
"""Namespace of tools that a client declares in none."""


def call_of(tool: Offered, arguments: str) -> dict[str, object] | None:
    """Write the members of a call of a tool; None where the policy wrote what such a tool does not take."""
    where = {} if tool.namespace is None else {"namespace": tool.namespace}
    if tool.kind == "function":
        return {"type": "function_call", "name": tool.name, **where, "arguments": arguments}
    value = _object(arguments)
    if tool.kind == "custom":
        text = value.get("input") if value is not None and len(value) == 1 else None
        made = {"type": "custom_tool_call", "name": tool.name, **where, "input": text}
        return made if isinstance(text, str) else None
    if value is None:
        return None
    kind = KINDS[tool.kind]
    return {"type": f"{tool.kind}_call", **kind.more, kind.member: {**kind.within, **value}}


def flat(name: str, namespace: str | None) -> str:
    """Return the name of the function that stands for a namespace's tool."""
    if not namespace or namespace == PLAIN:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


@dataclass(slots=True)
class Declared:
    """Tools of a request while they are read."""

    drop: Callable[[str, str], None]
    """Function that notes a kind of tools that is left out, and why."""
    offered: dict[str, Offered] = field(default_factory=dict)
    """Tools by the name that the policy calls them by, those that are not in the prompt, too."""
    later: list[dict[str, object]] = field(default_factory=list)
    """Functions that stand behind the beginning of the prompt."""
    named: list[tuple[str, str]] = field(default_factory=list)
    """Names of `offered` in the order of their declarations, each with its path in its list of tools."""

    def functions(self, tools: Sequence[AnyTool], *, deferred: bool) -> Iterator[dict[str, object]]:
        """Translate tools; `deferred`: also tools that wait for a search."""
        for index, tool in enumerate(tools):
            place = f"tools[{index}]"
            if isinstance(tool, Tool):
                yield from self._function(tool, place, None, "", deferred=deferred)
            elif isinstance(tool, KindTool):
                yield from self._kind(tool, place)
            elif isinstance(tool, Namespace):
                about = tool.description or ""
                for number, inner in enumerate(tool.tools):
                    if isinstance(inner, Tool):
                        within = f"{place}.tools[{number}]"
                        for made in self._function(inner, within, tool.name, about, deferred=deferred):
                            yield made
                            about = ""

    def _function(
        self, tool: Tool, place: str, namespace: str | None, about: str, *, deferred: bool
    ) -> Iterator[dict[str, object]]:
        name = flat(tool.name, namespace)
        self._offer(name, f"{place}.name", Offered(tool.type, tool.name, namespace))
        if not tool.defer_loading or deferred:
            texts = [text for text in (about, tool.description) if text]
            parameters = FREE if tool.type == "custom" else tool.parameters
            yield function(name, "\n\n".join(texts) if texts else tool.description, parameters)

    def _kind(self, tool: KindTool, place: str) -> Iterator[dict[str, object]]:
        if tool.type == "tool_search" and tool.execution != "client":
            self.drop(tool.type, PROVIDER)
            return
        kind = KINDS[tool.type]
        self._offer(tool.type, f"{place}.type", Offered(tool.type, tool.type))
        yield function(tool.type, tool.description or kind.description, tool.parameters or kind.parameters)

    def _offer(self, name: str, path: str, tool: Offered) -> None:
        self.offered[name] = tool
        self.named.append((name, path))


def search_is_ours(tools: Sequence[AnyTool]) -> bool:
    """Say whether the client searches deferred tools."""
    return any(
        isinstance(tool, KindTool) and tool.type == "tool_search" and tool.execution == "client" for tool in tools
    )


def arguments_of(kind: str, held: Mapping[str, object] | None) -> str:
    """Return the arguments of a call of a tool whose kind stands for its name, as the policy wrote them."""
    within = KINDS[kind].within
    given = {name: value for name, value in (held or {}).items() if value is not None}
    return json.dumps({name: value for name, value in given.items() if within.get(name) != value}, ensure_ascii=False)


def _object(arguments: str) -> Mapping[str, object] | None:
    try:
        value = parse_json(arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) and is_sendable(value) else None
