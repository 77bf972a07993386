"""Types of chat messages in OpenAI's form, as rows, templates, tools and users of a conversation exchange them."""

from __future__ import annotations

from typing import NotRequired, TypeAlias, TypedDict

from agentrl.system.json_value import JSON


class Part(TypedDict, total=False):
    """One part of a message's content: a text or an image."""

    type: str
    text: str | None
    image: object
    """In a row the bytes of a file, its path, or {bytes, path}; in a sample's prompt a `Picture`."""


Content: TypeAlias = str | list[Part] | None


class FunctionCall(TypedDict):
    """Name and arguments of a call."""

    name: str
    arguments: NotRequired[dict[str, JSON] | str]
    """A JSON object, or its text; for a malformed call, the policy's text."""


class ToolCall(TypedDict):
    """A call of a tool in an assistant message."""

    type: NotRequired[str]
    id: NotRequired[str]
    function: FunctionCall


class Message(TypedDict):
    """One message of a conversation. A template may read further keys, which are handed on to it."""

    role: str
    content: NotRequired[Content]
    name: NotRequired[str]
    """Name of the tool that gave the answer."""
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]
    weight: NotRequired[int]
    """In supervised training: 0 for a turn of the assistant that is shown and not learnt."""
