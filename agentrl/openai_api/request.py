"""Validation of chat completion requests, and of conversations of all APIs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, ClassVar, Literal, cast

import jsonschema_rs
from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails

from agentrl import tool as tools
from agentrl import trajectory
from agentrl.chat import AssistantMessage
from agentrl.chat.message import parse_json
from agentrl.errors import first_line
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.images import Image
from agentrl.openai_api.wire import DROPPED, Dropped, Listed, Reading, Wire, short, tagged, validated
from agentrl.system.json_value import JSON, as_object
from agentrl.tool import ToolSchema
from agentrl.tool.work import Unbounded, Work
from agentrl.trajectory import Message
from agentrl.trajectory.picture import image_part

MAX_MESSAGES = 2048
MAX_TOOLS = 2048
"""Tools of a request, found ones and those of namespaces counted: programs with many MCP servers have hundreds."""
MAX_STOPS = 16
MAX_SCHEMA = 256 << 10
"""Characters of the schema of an answer: compiled, it takes forty times as much memory."""

Place = Callable[[int, str], str]
"""Function that names a field of the message at an index as the client's request has it."""
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
"""Name of a tool; Anthropic takes the longest, and Claude Code makes such of the tools of MCP servers."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Requirements on every answer: OpenAI's `tool_choice`, `parallel_tool_calls` and `response_format`.

    Without `functions`, an answer may hold no call. No sampler is constrained: an answer that breaks them is kept as it
    was sampled, and the policy is asked again (`Session`).
    """

    fields: tuple[str, ...]
    """Fields of the request that ask for them."""
    functions: frozenset[str] | None
    """Functions that may be called; None: any."""
    needed: bool
    """True: at least one of them is called."""
    at_most: int | None
    """Calls that an answer may make; None: any number."""
    text: Callable[[str], str | None] | None = None
    """Function that describes the error of the text of an answer without calls; None: it may be any."""

    def broken_by(self, message: AssistantMessage) -> str | None:
        """Describe the error of an answer; None when it meets the requirements."""
        calls = message.calls
        if self.text is not None and not calls and (problem := self.text(message.text)) is not None:
            return problem
        if self.at_most is not None and len(calls) > self.at_most:
            return f"made {len(calls)} calls at once"
        if self.functions is None:
            return None
        if not calls:
            return "made no call" if self.needed else None
        for call in calls:
            if call.error is not None:
                return f"made a broken call ({call.error})"
            if call.name not in self.functions:
                return f"called {call.name[:64]!r}"
        return None


class Part(Wire):
    """Part of a message's content; a refusal is text of the assistant's."""

    apis, place = "chat", "part"
    type: Literal["text", "refusal", "image_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: Image | None = None

    @model_validator(mode="after")
    def _has_its_content(self) -> Part:
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of the type {self.type!r} needs {self.type!r}")
        if self.image_url is not None and self.type != "image_url":
            raise ValueError(f"a part of the type {self.type!r} has no image")
        return self


def content_kind(content: object) -> str:
    """Return the tag of text or of a list; tags of unions begin with a colon, which no field does."""
    return ":list" if isinstance(content, list) else ":str"


Content = Annotated[Annotated[str, Tag(":str")] | Annotated[Listed[Part], Tag(":list")], Discriminator(content_kind)]


class FunctionCall(Wire):
    """Function name and arguments, as JSON text, of a call; either may be a mistake of the policy."""

    apis, place = "chat", "call.function"
    name: str
    arguments: str


class ToolCall(Wire):
    """One call of an assistant message."""

    apis, place = "chat", "call"
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall

    def to_call(self) -> trajectory.ToolCall:
        """Convert to the form that `Chat` takes."""
        function: trajectory.FunctionCall = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(Wire):
    """One message; `check_conversation` says which role may have which fields."""

    apis, place = "chat", "message"
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    name: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None

    @property
    def shown(self) -> trajectory.Content:
        """The content in the form that `Chat` takes: text, its parts joined, or parts where there are images."""
        if not isinstance(self.content, list):
            return self.content or self.refusal or ""
        parts = list[trajectory.Part]()
        for picture, run in itertools.groupby(self.content, lambda part: part.image_url):
            if picture is None:
                parts.append({"type": "text", "text": "".join(part.text or part.refusal or "" for part in run)})
            else:
                parts += [image_part(picture) for _ in run]
        if any(part["type"] == "image" for part in parts):
            return parts
        return "".join(part["text"] or "" for part in parts)

    def to_message(self) -> Message:
        """Convert to the form that `Chat` takes. Arguments stay the text that they are."""
        message: Message = {"role": self.role, "content": self.shown}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.to_call() for call in self.tool_calls]
        return message


def _checked_properties(properties: dict[str, object]) -> dict[str, object]:
    """Check that each parameter has a JSON schema. MCP servers in Go and Rust write `true` for any value."""
    for name, schema in properties.items():
        if not isinstance(schema, bool | dict):
            wrong = InitErrorDetails(type="dict_type", loc=(name,), input=schema)
            raise ValidationError.from_exception_data("properties", [wrong])
    return properties


class Parameters(Wire):
    """JSON schema of a function's parameters, as far as chat templates take it apart."""

    model_config = ConfigDict(extra="allow")

    type: Literal["object"] | None = None
    properties: Annotated[dict[str, object], AfterValidator(_checked_properties)] | None = None
    required: Listed[str] | None = None


def _checked_schema(schema: dict[str, object]) -> dict[str, object]:
    Parameters.model_validate(schema)
    json.dumps(schema, allow_nan=False)
    return schema


Schema = Annotated[dict[str, object], AfterValidator(_checked_schema)]
"""Parameters as the client's own object, in the client's order of keys."""


class FunctionSchema(Wire):
    """Function of a tool declaration."""

    apis, place = "chat", "tool.function"
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ToolDeclaration(Wire):
    """Tool declaration."""

    apis, place = "chat", "tool"
    type: Literal["function"]
    function: FunctionSchema


def _checked_tool(tool: dict[str, object], info: ValidationInfo[Reading | None]) -> dict[str, object]:
    """Check a declaration; a template is given the client's own object, in the client's order of keys."""
    declared = ToolDeclaration.model_validate(tool, context=info.context)
    if declared.function.strict and info.context is not None:
        info.context.drop("strict", "no sampler is constrained")
    function = cast(dict[str, object], tool["function"])
    json.dumps(tool, allow_nan=False)
    return {"type": "function", "function": {name: function[name] for name in function if name in FunctionSchema.known}}


class DroppedTool(Dropped):
    """Tool of a kind that is left out."""

    place = "tool.type"


Tools = list[dict[str, object] | DroppedTool]
DeclaredTool = Annotated[
    Annotated[dict[str, object], AfterValidator(_checked_tool), Tag(":function")]
    | Annotated[DroppedTool, Tag(DROPPED)],
    tagged("chat", "tool.type", "function", function="function"),
]


class ChosenFunction(Wire):
    """Name of a function that must be called."""

    apis, place = "chat", "tool_choice.function"
    name: str


class NamedChoice(Wire):
    """A `tool_choice` that names a function."""

    apis, place = "chat", "tool_choice"
    type: Literal["function"]
    function: ChosenFunction


class AllowedFunctions(Wire):
    """Functions that an answer may call, and whether it has to."""

    apis, place = "chat", "tool_choice.allowed_tools"
    mode: Literal["auto", "required"]
    tools: Listed[NamedChoice] = Field(min_length=1)


class AllowedChoice(Wire):
    """A `tool_choice` that leaves some of the tools; the prompt has all of them."""

    apis, place = "chat", "tool_choice"
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def choice_kind(choice: object) -> str:
    """Return the tag of a `tool_choice`."""
    if isinstance(choice, str):
        return ":str"
    return ":allowed" if isinstance(choice, dict) and choice.get("type") == "allowed_tools" else ":named"


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag(":str")]
    | Annotated[AllowedChoice, Tag(":allowed")]
    | Annotated[NamedChoice, Tag(":named")],
    Discriminator(choice_kind),
]


class AnswerSchema(Wire):
    """JSON schema that the text of an answer must fit."""

    apis, place = "chat", "response_format.json_schema"
    name: Name
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """OpenAI's `response_format`."""

    apis, place = "chat", "response_format"
    type: Literal["text", "json_object", "json_schema"]
    json_schema: AnswerSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed for the type 'json_schema', and for no other")
        return self

    @property
    def check(self) -> Callable[[str], str | None] | None:
        """Function that describes the error of a text; None: it may be any."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return json_check(json.dumps(schema or {}))


class TextFormat(AnswerSchema):
    """The same as Responses and Messages declare it."""

    apis, place = "responses messages", "format"
    type: Literal["text", "json_object", "json_schema"]
    name: Name = "answer"

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is needed for the type 'json_schema', and for no other")
        return self

    @property
    def to_response_format(self) -> ResponseFormat:
        """The form of Chat Completions."""
        schema = None if self.schema_ is None else AnswerSchema(name=self.name, schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=schema)


@lru_cache(32)
def json_check(schema: str) -> Callable[[str], str | None]:
    """Compile a JSON schema, in JSON text, of the text of answers.

    Raises ValueError for an invalid schema, and for a schema that refers to anything outside itself, has more than
    MAX_SCHEMA characters, or has more schemas for one value than `agentrl.tool.work.MOST`.
    """
    if len(schema) > MAX_SCHEMA:
        raise ValueError(f"expected at most {MAX_SCHEMA:,} characters, found {len(schema):,}")
    root = json.loads(schema)
    try:
        work = Work(root)
    except Unbounded as error:
        raise ValueError(str(error)) from error
    validator = jsonschema_rs.validator_for(root, offline=True)

    def problem(text: str) -> str | None:
        """Describe the error of a text; None when it is JSON that fits."""
        try:
            value = parse_json(text)
            if validator.is_valid(value):
                return None
            if work.is_much(value):  # To find its fault takes a step for each way through the schema.
                return "does not fit the schema"
            fault = next(validator.iter_errors(value))
        except ValueError as error:  # of the validator: half a surrogate pair, or too deep nesting
            return f"is no JSON ({error})"
        path = ".".join(map(str, fault.instance_path))
        return _short_fault(
            f"does not fit the schema ({path}: {fault.message})"
            if path
            else f"does not fit the schema ({fault.message})"
        )

    return problem


class StreamOptions(Wire):
    """OpenAI's `stream_options`."""

    apis, place = "chat", "stream_options"
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Stop = Annotated[str, StringConstraints(max_length=256)]
Stops = Annotated[
    Annotated[Stop, Tag(":str")] | Annotated[Listed[Stop], Field(max_length=MAX_STOPS), Tag(":list")],
    Discriminator(content_kind),
]


class ChatRequest(Wire):
    """Body of POST chat/completions."""

    apis, place = "chat", "request"
    model: str = Field("policy", max_length=256)
    messages: Listed[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Listed[DeclaredTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    """Extension of OpenAI's API: adds `token_ids` to the choice and `prompt_token_ids` to the answer."""

    carries_reasoning: ClassVar[bool] = False
    """False: the API has no field in which all clients send reasoning back."""

    def place_of(self, field: str) -> str:
        """Name a field as the client's API does."""
        return field

    @property
    def token_limit(self) -> int | None:
        """Tokens that the answer may have, the lower of both fields; None: as many as the budget allows."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def stops(self) -> tuple[str, ...]:
        """Non-empty stop texts."""
        return tuple(text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if text)

    @property
    def may_call(self) -> bool:
        """True when tool calls are read; with tool_choice "none" they stay text."""
        return self.tool_choice != "none"

    @property
    def promise(self) -> Promise | None:
        """Requirements on every answer to this request; None: it may hold anything."""
        functions, fields, choice = None, list[str](), self.tool_choice
        if chosen := chosen_names(choice):
            functions = frozenset(chosen)
        elif choice == "required":
            functions = frozenset(self.callable_names)
        needed = functions is not None and not (
            isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "auto"
        )
        if functions is not None:
            fields.append(self.place_of("tool_choice"))
        at_most = 1 if self.parallel_tool_calls is False and self.may_call else None
        if at_most is not None:
            fields.append(self.place_of("parallel_tool_calls"))
        # An answer that has to call has no text to check.
        text = None if self.response_format is None or needed else self.response_format.check
        if text is not None:
            fields.append(self.place_of("response_format"))
        return Promise(tuple(fields), functions, needed, at_most, text) if fields else None

    @property
    def functions(self) -> list[ToolSchema]:
        """Declared tools, as ToolDeclaration checked them, without tools of a kind that is left out."""
        return cast(list[ToolSchema], [tool for tool in self.tools or () if not isinstance(tool, Dropped)])

    @property
    def callable_names(self) -> list[str]:
        """Names of the functions that an answer may call."""
        return [tool["function"]["name"] for tool in self.functions]

    @property
    def declared_tools(self) -> list[ToolSchema]:
        """Declared tools as chat templates take them."""
        return as_templates_take(self.functions)


def as_templates_take(functions: Iterable[ToolSchema]) -> list[ToolSchema]:
    """Write tools without null fields, with parameters, and with schemas that are objects, as chat templates need."""
    declared: list[ToolSchema] = []
    for tool in functions:
        function = cast(tools.FunctionSchema, {k: v for k, v in tool["function"].items() if v is not None})
        parameters = function.setdefault("parameters", {"type": "object"})
        properties: dict[str, JSON] = {
            name: ({} if one else {"not": {}}) if isinstance(one, bool) else one
            for name, one in as_object(parameters.get("properties")).items()
        }
        function["parameters"] = {**parameters, "properties": properties}
        declared.append({"type": "function", "function": function})
    return declared


def chosen_names(choice: str | NamedChoice | AllowedChoice | None) -> list[str]:
    """List the functions that a `tool_choice` names."""
    if isinstance(choice, NamedChoice):
        return [choice.function.name]
    return [one.function.name for one in choice.allowed_tools.tools] if isinstance(choice, AllowedChoice) else []


def read_request(body: JSON, reading: Reading) -> ChatRequest:
    """Read a request. Raises ApiError naming the field that is wrong or not supported."""
    request = validated(body, ChatRequest, reading)
    check_conversation(request.messages)
    refuse_twice(
        (tool["function"]["name"], f"tools[{index}].function.name")
        for index, tool in enumerate(cast("list[ToolSchema | Dropped]", request.tools or ()))
        if not isinstance(tool, Dropped)
    )
    check_tools(request)
    check_format(request)
    return request


def check_format(request: ChatRequest) -> None:
    """Raise ApiError for a schema that no text can be checked by."""
    if request.response_format is None:
        return
    try:
        _ = request.response_format.check
    except (ValueError, RecursionError) as error:
        param = f"{request.place_of('response_format.json_schema')}.schema"
        message = f"{param}: it is no JSON schema that can be checked here: {_short_fault(first_line(error))}."
        raise ApiError(400, message, param=param, code="invalid_value") from None


def in_messages(index: int, field: str) -> str:
    """Name a field of a message as `messages[0].content`."""
    return f"messages[{index}].{field}"


def check_conversation(messages: Sequence[ChatMessage], place: Place = in_messages) -> None:
    """Raise ApiError for a message without what its role needs, and for answers to calls that were not made.

    `place`: names a field of the message at an index as the client's request has it.
    """
    calls: dict[str, None] = {}
    answered: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "tool":
            _check_answer(message, calls, answered, partial(_refusal, place, index))
            continue
        refuse = partial(_refusal, place, index)
        if message.tool_call_id is not None:
            raise refuse("tool_call_id", f"a {message.role} message answers no call")
        if message.tool_calls and message.role != "assistant":
            raise refuse("tool_calls", f"a {message.role} message makes no calls")
        if message.content is None and message.role != "assistant":
            raise refuse("content", f"a {message.role} message needs a content")
        if message.role != "user" and isinstance(message.shown, list):
            raise refuse("content", f"a {message.role} message has no image: a user's and a tool's may")
        calls, answered = {}, set()
        for call in message.tool_calls or ():
            if call.id in calls:
                raise refuse("tool_calls", f"two calls have the id {short(call.id)}")
            calls[call.id] = None


def _check_answer(
    message: ChatMessage, calls: Mapping[str, None], answered: set[str], refuse: Callable[[str, str], ApiError]
) -> None:
    if message.tool_calls:
        raise refuse("tool_calls", "a tool message makes no calls")
    if message.content is None:
        raise refuse("content", "a tool message needs a content")
    id = message.tool_call_id
    if not id:
        raise refuse("tool_call_id", "a tool message needs the id of the call that it answers")
    if id in answered:
        raise refuse("tool_call_id", f"the call {short(id)} is answered already")
    if id not in calls:
        made = ", ".join(map(short, itertools.islice(calls, 8))) or "none"
        raise refuse("tool_call_id", f"the assistant message before made no call {short(id)}; its calls: {made}")
    answered.add(id)


def _refusal(place: Place, index: int, field: str, problem: str) -> ApiError:
    param = place(index, field)
    return ApiError(400, f"{param}: {problem}.", param=param, code="invalid_value")


def refuse_twice(names: Iterable[tuple[str, str]]) -> None:
    """Raise ApiError for a tool that is declared twice. `names`: (name, its path in the client's request)."""
    known = set[str]()
    for name, param in names:
        if name in known:
            raise ApiError(400, f"{param}: {name!r} is declared twice.", param=param, code="invalid_value")
        known.add(name)


def check_tools(request: ChatRequest) -> None:
    """Raise ApiError for too many tools, and a forced call of no declared tool."""
    known_names = dict.fromkeys(request.callable_names)
    if (number := len(known_names)) > MAX_TOOLS:
        message = (
            f"tools: expected at most {MAX_TOOLS:,}, found ones and those of namespaces counted, found {number:,}; "
            "leave out tools that the task does not need, e.g. MCP servers in the program's settings."
        )
        raise ApiError(400, message, param="tools", code="invalid_value")
    choice = request.tool_choice
    if choice == "required" and not known_names:
        raise ApiError(400, "tool_choice='required' needs tools.", param="tool_choice", code="invalid_value")
    if (wrong := next((one for one in chosen_names(choice) if one not in known_names), None)) is not None:
        known = ", ".join(itertools.islice(known_names, 16)) or "none"
        message = f"tool_choice names {short(wrong)}, which is not among the tools: {known}."
        raise ApiError(400, message, param="tool_choice", code="invalid_value")


def _short_fault(text: str) -> str:
    """Shorten the validator's text, which may quote a whole document."""
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"
