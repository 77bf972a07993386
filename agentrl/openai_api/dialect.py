"""The interface of an API that clients speak: how it is read, and how answers and errors are written.

Sessions know `ChatRequest` alone. A dialect translates its requests into one, and completions into its own shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, cast

from agentrl.openai_api.completion import Begun, Completion, encoded
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.fields import Api
from agentrl.openai_api.request import (
    MAX_MESSAGES,
    ChatMessage,
    ChatRequest,
    ChosenFunction,
    FunctionCall,
    NamedChoice,
    ToolCall,
    Tools,
    check_conversation,
    check_format,
    check_tools,
)
from agentrl.openai_api.wire import Reading
from agentrl.openai_api.writer import EventWriter
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema

KEEP_ALIVE = b": generating\n\n"
"""A comment, which all clients skip."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as the client declared it, by the name that the policy calls it by."""

    kind: str
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation that a session keeps, so that a later request sends only the messages after it."""

    messages: Sequence[ChatMessage]
    """Up to the answer that it ends with."""
    tools: Tools | None = None
    later: Sequence[dict[str, object]] = ()
    """Functions that were declared behind the beginning, if at all."""
    offered: Mapping[str, Offered] = field(default_factory=dict)
    """Tools as the client declared them, by the name that the policy calls them by, where an API has other forms."""


Kept = Mapping[str, Conversation]
"""Conversations that a session keeps, by the id of the answer that they end with."""


class Dialect(Protocol):
    """One API. It has no state: a session hands over the conversations that it keeps."""

    api: Api
    """Its name in the table of fields."""
    path: str
    """Its route below a session's address."""

    def read(self, body: JSON, reading: Reading, kept: Kept) -> ChatRequest:
        """Translate a request, which is JSON. Raises ApiError that names the field which is wrong or not supported."""
        ...

    def turns(self, answer: JSON, reading: Reading) -> list[ChatMessage]:
        """Translate a server's answer, as a later request would send it back.

        `answer`: Chat Completions' message, Messages' content, or Responses' output. Raises ApiError.
        """
        ...

    def answer(self, completion: Completion) -> dict[str, object]:
        """Write a completion as one object."""
        ...

    def writer(self, begun: Begun) -> EventWriter:
        """Begin to write an answer as the events of a stream."""
        ...

    def error(self, error: ApiError) -> dict[str, JSON]:
        """Write an error as the body of an answer."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """Write an error that ends a stream."""
        ...


class Translated(ChatRequest):
    """A request that came in another shape than OpenAI's Chat Completions."""

    apis = ""
    carried: tuple[ChatMessage, ...] | None = None
    """Messages that a later request may continue by the answer's id; None: they are not kept."""
    given: object = None
    """The request as it was, for answers that repeat parts of it."""
    begun: str = ""
    """Beginning of the answer, which the policy continues."""
    later: Sequence[dict[str, object]] = ()
    """Functions that the policy may call, and that its prompt declares behind its beginning, if at all."""
    offered: Mapping[str, Offered] = {}
    """Tools as the client declared them, by the name that the policy calls them by."""
    places: Mapping[str, str] = {}
    """Places of fields in the client's request, where they have another name there."""
    carries_reasoning: ClassVar[bool] = True

    def place_of(self, field: str) -> str:
        return self.places.get(field, field)

    @property
    def callable_names(self) -> list[str]:
        return [*super().callable_names, *(cast(ToolSchema, one)["function"]["name"] for one in self.later)]


@dataclass(frozen=True, slots=True)
class Placed:
    """A message and its path in the client's request."""

    message: ChatMessage
    path: str


def checked(request: Translated, placed: Sequence[Placed]) -> Translated:
    """Check a translated request, whose messages are `placed`. Raises ApiError in the client's words."""
    if len(placed) > MAX_MESSAGES:
        path = placed[MAX_MESSAGES].path
        message = f"{path}: expected at most {MAX_MESSAGES:,} messages, each result of a tool counted as one."
        raise ApiError(400, message, param=path, code="invalid_value")
    check_conversation(request.messages, lambda index, field: placed[index].path)
    check_tools(request)
    check_format(request)
    return request


def function(name: str, description: str | None, parameters: Mapping[str, object] | None) -> dict[str, object]:
    """Declare a tool as Chat Completions do."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def functions_text(functions: Sequence[object]) -> str:
    """Write declarations of functions for a place after the prompt, as programs describe them to the policy."""
    return "\n".join(["<functions>", *map(function_line, functions), "</functions>"])


def function_line(function: object) -> str:
    """Write one declaration there, on a line of its own."""
    return f"<function>{json.dumps(function, ensure_ascii=False)}</function>"


def named(name: str) -> NamedChoice:
    """Choose one function, which must be called."""
    return NamedChoice(type="function", function=ChosenFunction(name=name))


def call(id: str, name: str, arguments: str) -> ToolCall:
    """Make a call of the policy, whose texts may be mistakes."""
    return ToolCall.model_construct(id=id, function=FunctionCall.model_construct(name=name, arguments=arguments))


def assistant(said: str, thought: str, calls: Sequence[ToolCall]) -> ChatMessage:
    """Make an assistant message of one answer."""
    return ChatMessage.model_construct(
        role="assistant", content=said, reasoning_content=thought or None, tool_calls=list(calls) or None
    )


def event(value: object, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encoded(value) + b"\n\n"
