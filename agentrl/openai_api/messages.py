"""Anthropic's Messages: content blocks of text, thinking, tool use and tool results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, cast

from pydantic import Discriminator, Field, Tag, model_validator

from agentrl.chat.message import DECODER, content_text
from agentrl.openai_api.completion import Begun, Completion
from agentrl.openai_api.dialect import (
    Conversation,
    Kept,
    Placed,
    Translated,
    assistant,
    call,
    checked,
    event,
    function,
    function_line,
    functions_text,
    named,
)
from agentrl.openai_api.errors import NO_ROOM, ApiError
from agentrl.openai_api.fields import Api
from agentrl.openai_api.images import Image
from agentrl.openai_api.request import (
    MAX_MESSAGES,
    MAX_STOPS,
    ChatMessage,
    ChatRequest,
    Name,
    NamedChoice,
    Part,
    Schema,
    Stop,
    TextFormat,
    ToolCall,
    Tools,
    content_kind,
    refuse_twice,
)
from agentrl.openai_api.wire import DROPPED, Dropped, Listed, Reading, Wire, is_sendable, kind_of, tagged, validated
from agentrl.openai_api.writer import EventWriter, pieces
from agentrl.system.json_value import JSON
from agentrl.trajectory import Message

UNPARSED = "unparsed_arguments"
"""The member of a call's `input` that holds the text of arguments which are no JSON object."""
BILL = "x-anthropic-billing-header:"
LOST = "thread_not_found"
ERRORS = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def _client_tool(**properties: object) -> dict[str, object]:
    texts = {name: value if isinstance(value, dict) else {"type": value} for name, value in properties.items()}
    return {"type": "object", "properties": texts, "required": ["command"]}


_LINES = {"type": "array", "items": {"type": "integer"}, "description": "First and last line; -1: the end."}
CLIENT_TOOLS: dict[str, tuple[str, dict[str, object]]] = {
    "bash": (
        "Run a command in a shell that stays open.",
        _client_tool(command="string", restart={"type": "boolean", "description": "Start the shell again."}),
    ),
    "text_editor": (
        "View, create and edit text files.",
        _client_tool(
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
            path="string",
            file_text="string",
            old_str="string",
            new_str="string",
            insert_line="integer",
            insert_text="string",
            view_range=_LINES,
        ),
    ),
    "memory": (
        "Keep notes in files under /memories.",
        _client_tool(
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            path="string",
            view_range=_LINES,
            file_text="string",
            old_str="string",
            new_str="string",
            insert_line="integer",
            insert_text="string",
            old_path="string",
            new_path="string",
        ),
    ),
}
"""Description and parameters of tools that a client runs, by kind, for the policy, which never learnt them."""


class TextBlock(Wire):
    """Text."""

    apis, place = "messages", "block"
    type: Literal["text"]
    text: str


class ImageBlock(Wire):
    """An image, in base64."""

    apis, place = "messages", "block"
    type: Literal["image"]
    source: Image


class ThinkingBlock(Wire):
    """Reasoning of the policy."""

    apis, place = "messages", "block"
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Wire):
    """A call of the policy."""

    apis, place = "messages", "block"
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, object]

    def to_call(self) -> ToolCall:
        """Translate; arguments that were no JSON object become the text that they were."""
        unparsed = self.input.get(UNPARSED) if len(self.input) == 1 else None
        arguments = unparsed if isinstance(unparsed, str) else json.dumps(self.input, ensure_ascii=False)
        return call(self.id, self.name, arguments)


class ToolReference(Wire):
    """A deferred tool that a search of the client's found."""

    apis, place = "messages", "block"
    type: Literal["tool_reference"]
    tool_name: str


class Tool(Wire):
    """Tool declaration."""

    apis, place = "messages", "tool"
    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: Schema
    defer_loading: bool | None = None

    def to_function(self) -> dict[str, object]:
        """Translate."""
        return function(self.name, self.description, self.input_schema)


class ClientTool(Wire):
    """Tool that a client runs, whose schema the API's documents have."""

    apis, place = "messages", "tool"
    type: str
    name: Name
    defer_loading: bool | None = None

    def to_function(self) -> dict[str, object]:
        """Translate."""
        description, parameters = CLIENT_TOOLS[kind_of({"type": self.type})]
        return function(self.name, description, parameters)


class DroppedTool(Dropped):
    """Tool of a kind that is left out."""

    place = "tool.type"


AnyTool = Annotated[
    Annotated[Tool, Tag(":custom")] | Annotated[ClientTool, Tag(":client")] | Annotated[DroppedTool, Tag(DROPPED)],
    tagged("messages", "tool.type", "custom", custom="custom", client=" ".join(CLIENT_TOOLS)),
]


class ChangedTool(Wire):
    """A tool that joins or leaves a conversation: its declaration or its name."""

    apis, place = "messages", "block.tool"
    type: Literal["tool_definition", "tool_reference"]
    name: str | None = None
    definition: AnyTool | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ChangedTool:
        if (self.definition is None) == (self.name is None):
            raise ValueError("a changed tool has a definition or a name")
        return self


class ToolChange(Wire):
    """A tool that joins or leaves in the middle of a conversation, in a system message."""

    apis, place = "messages", "block"
    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedTool


class DroppedBlock(Dropped):
    """Block of a kind that is left out."""

    place = "block.type"


class DroppedResult(DroppedBlock):
    """The same in the answer of a tool."""

    place = "result.type"


Texts = Annotated[Annotated[str, Tag(":str")] | Annotated[Listed[TextBlock], Tag(":list")], Discriminator(content_kind)]
Seen = Annotated[
    Annotated[TextBlock, Tag(":text")]
    | Annotated[ImageBlock, Tag(":image")]
    | Annotated[ToolReference, Tag(":tool_reference")]
    | Annotated[DroppedResult, Tag(DROPPED)],
    tagged("messages", "result.type", text="text", image="image", tool_reference="tool_reference"),
]
Result = Annotated[Annotated[str, Tag(":str")] | Annotated[Listed[Seen], Tag(":list")], Discriminator(content_kind)]


class ToolResultBlock(Wire):
    """The answer to a call."""

    apis, place = "messages", "block"
    type: Literal["tool_result"]
    tool_use_id: str
    content: Result = ""
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag(":text")]
    | Annotated[ImageBlock, Tag(":image")]
    | Annotated[ThinkingBlock, Tag(":thinking")]
    | Annotated[ToolUseBlock, Tag(":tool_use")]
    | Annotated[ToolResultBlock, Tag(":tool_result")]
    | Annotated[ToolChange, Tag(":tool_change")]
    | Annotated[DroppedBlock, Tag(DROPPED)],
    tagged(
        "messages",
        "block.type",
        text="text",
        image="image",
        thinking="thinking",
        tool_use="tool_use",
        tool_result="tool_result",
        tool_change="tool_addition tool_removal",
    ),
]
Blocks = Annotated[Annotated[str, Tag(":str")] | Annotated[Listed[Block], Tag(":list")], Discriminator(content_kind)]


class Turn(Wire):
    """One message."""

    apis, place = "messages", "message"
    role: Literal["user", "assistant", "system"]
    content: Blocks


class Choice(Wire):
    """How an answer may call."""

    apis, place = "messages", "tool_choice"
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(TextFormat):
    """JSON that the text of an answer must fit."""

    type: Literal["json_schema"]


class OutputConfig(Wire):
    """How the policy writes."""

    apis, place = "messages", "output_config"
    format: Format | None = None


class Thread(Wire):
    """A conversation whose later requests send only what comes after an answer."""

    apis, place = "messages", "thread"
    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class MessagesRequest(Wire):
    """Body of POST messages."""

    apis, place = "messages", "request"
    model: str = Field("policy", max_length=256)
    max_tokens: int | None = Field(None, ge=1)
    messages: Listed[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: Listed[AnyTool] | None = None
    tool_choice: Choice | None = None
    stop_sequences: Listed[Stop] | None = Field(None, max_length=MAX_STOPS)
    stream: bool | None = None

    output_config: OutputConfig | None = None
    output_format: Format | None = None
    thread: Thread | None = None


class Messages:
    """The dialect of POST messages."""

    api: Api = "messages"
    path = "v1/messages"

    def read(self, body: JSON, reading: Reading, kept: Kept) -> ChatRequest:
        asked = validated(body, MessagesRequest, reading)
        before = _continued(asked, kept)
        placed = [Placed(message, "thread.previous_message_id") for message in before.messages]
        if text := _system(asked.system):
            placed.append(Placed(ChatMessage(role="system", content=text), "system"))
        config = asked.output_config or OutputConfig()
        format, place = asked.output_format or config.format, "output_config.format"
        if asked.output_format is not None:
            place = "output_format"
        declared, later = _declared(asked.tools or (), reading)
        if before.messages:
            declared, later = before.tools or Tools(), _later_of(before)
        for index, turn in enumerate(asked.messages):
            placed += _placed(turn, f"messages[{index}]", later)
        begun = _begun(placed.pop()) if len(placed) > 1 and placed[-1].message.role == "assistant" else ""
        request = Translated.model_construct(
            model=asked.model,
            messages=[one.message for one in placed],
            tools=declared,
            tool_choice=_choice(asked.tool_choice),
            parallel_tool_calls=not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use),
            response_format=None if format is None else format.to_response_format,
            places={
                "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
                **dict.fromkeys(("response_format", "response_format.json_schema"), place),
            },
            max_tokens=asked.max_tokens,
            stop=asked.stop_sequences,
            stream=asked.stream,
            carried=None if asked.thread is None else tuple(one.message for one in placed),
            begun=begun,
            later=later.functions,
        )
        return checked(request, placed)

    def turns(self, answer: JSON, reading: Reading) -> list[ChatMessage]:
        turn = validated({"role": "assistant", "content": answer}, Turn, reading)
        return [one.message for one in _placed(turn, "response", Later())]

    def answer(self, completion: Completion) -> dict[str, object]:
        """Make the `message` object."""
        content = list(_blocks(completion))
        return {**_head(completion), "content": content, **_end(completion), "usage": _usage(completion)}

    def writer(self, begun: Begun) -> EventWriter:
        return _Blocks(begun)

    def error(self, error: ApiError) -> dict[str, JSON]:
        """Make the body: {"type": "error", "error": {"type", "message"}}."""
        kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        # Programs that shorten their context look for these words.
        begin = "prompt is too long: " if error.code == NO_ROOM else ""
        about: dict[str, JSON] = {"type": kind, "message": begin + error.message}
        if error.code == LOST:
            about["details"] = {"error_code": LOST}  # Clients then send the conversation whole.
        return {"type": "error", "error": about}

    def error_event(self, error: ApiError) -> bytes:
        """Write the error as the last event of a stream."""
        return event(self.error(error), "error")


class _Blocks(EventWriter):
    """Writes the events: the message's begin, each block in pieces, the message's end."""

    _index = -1
    _kind = ""
    """Kind of the block that is open."""

    def open(self, begun: Begun) -> Iterator[bytes]:
        message = {**_head(begun), "content": [], "stop_reason": None, "stop_sequence": None}
        # The cached tokens of an answer that is being sampled are told at its end.
        usage = _usage(begun) if isinstance(begun, Completion) else _tokens(len(begun.prompt_ids))
        yield _event("message_start", message={**message, "usage": {**usage, "output_tokens": 0}})

    def reason(self, piece: str) -> Iterator[bytes]:
        if self._kind != "thinking":
            yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
        yield self._delta({"type": "thinking_delta", "thinking": piece})

    def say(self, piece: str) -> Iterator[bytes]:
        if self._kind != "text":
            yield from self._start({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": piece})

    def close(self, completion: Completion) -> Iterator[bytes]:
        for block in _calls(completion):
            yield from self._start({**block, "input": {}})
            for piece in pieces(json.dumps(block["input"])):
                yield self._delta({"type": "input_json_delta", "partial_json": piece})
        yield from self._stop()
        yield _event("message_delta", delta=_end(completion), usage=_usage(completion))
        yield _event("message_stop")

    def _start(self, block: Mapping[str, object]) -> Iterator[bytes]:
        yield from self._stop()
        self._index, self._kind = self._index + 1, str(block["type"])
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> Iterator[bytes]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self.begun.id})
        if self._kind:
            yield _event("content_block_stop", index=self._index)
        self._kind = ""


def joined(content: str | Sequence[TextBlock | ImageBlock] | None) -> str | list[Part]:
    """Join text blocks that are read one after another; a blank line parts them. Images stay parts of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = list[Part]()
    for is_text, run in itertools.groupby(content, lambda block: isinstance(block, TextBlock)):
        if is_text:
            text = "\n\n".join(block.text for block in run if isinstance(block, TextBlock))
            parts.append(Part(type="text", text=text))
        else:
            blocks = [block for block in run if isinstance(block, ImageBlock)]
            parts += [Part.model_construct(type="image_url", image_url=block.source) for block in blocks]
    if any(part.image_url for part in parts):
        return parts
    return "".join(part.text or "" for part in parts)


def _system(system: str | Sequence[TextBlock] | None) -> str | list[Part]:
    """Join the blocks of a system prompt without Claude Code's bill, which some versions change at each request."""
    return joined(system if isinstance(system, str) else [one for one in system or () if not one.text.startswith(BILL)])


def _continued(asked: MessagesRequest, kept: Kept) -> Conversation:
    """Find the answer that a request of a thread continues; nothing where it begins a thread. Raises ApiError."""
    if asked.thread is None or asked.thread.type == "create":
        return Conversation(())
    field = "system" if asked.system is not None else "tools" if asked.tools is not None else None
    if field is not None:
        message = f"{field}: a thread goes on with what it was created with; leave it out, or begin another thread."
        raise ApiError(400, message, param=field, code="unsupported_value")
    id = asked.thread.previous_message_id or ""
    if (before := kept.get(id.removeprefix("msg_"))) is None:
        message = f"thread.previous_message_id: this session has kept no answer {id[:80]!r} of a thread."
        raise ApiError(404, message, param="thread.previous_message_id", code=LOST)
    return before


def _begun(last: Placed) -> str:
    """Return the text with which a client begins the answer, in its last message. Raises ApiError for all else."""
    message = last.message
    text = message.shown
    problem = None
    if message.tool_calls or message.reasoning_content or not isinstance(text, str) or not text:
        problem = "an answer is begun by text alone"
    elif text[-1].isspace():
        problem = "the beginning of an answer ends with no blank, which is part of the policy's next token"
    if problem is not None:
        raise ApiError(
            400,
            f"{last.path}: the last message is the assistant's, and {problem}; end with a user message.",
            param=last.path,
            code="unsupported_value",
        )
    return str(text)


@dataclass(slots=True)
class Later:
    """Tools that the beginning of the prompt does not declare, and that may be called."""

    functions: list[dict[str, object]] = field(default_factory=list)
    hidden: dict[str, object] = field(default_factory=dict)
    """Functions by name that no text has declared yet."""

    def add(self, tool: Tool | ClientTool) -> object:
        """Note a tool; return what declares it."""
        made = tool.to_function()
        self.functions.append(made)
        return made["function"]

    def named(self, name: str) -> object:
        """Return what declares a tool at the first time, and its name alone afterwards."""
        return self.hidden.pop(name, {"name": name})


def _declared(tools: Sequence[Tool | ClientTool | DroppedTool], reading: Reading) -> tuple[Tools, Later]:
    """Translate tools: (tools that the prompt declares, deferred tools).

    A deferred tool is declared where a search of the client's finds it, after the prompt, which stays as it is. Where
    the search would run at a provider, all tools are declared. Raises ApiError for a tool that is declared twice.
    """
    refuse_twice(
        (tool.name, f"tools[{index}].name") for index, tool in enumerate(tools) if not isinstance(tool, DroppedTool)
    )
    searched = any(name.startswith("tool_search_tool") for name in reading.dropped)
    declared, later = Tools(), Later()
    for tool in tools:
        if isinstance(tool, DroppedTool):
            continue
        if tool.defer_loading and not searched:
            later.hidden[tool.name] = later.add(tool)
        else:
            declared.append(tool.to_function())
    return declared, later


def _later_of(before: Conversation) -> Later:
    """Return the deferred tools of a conversation that continues."""
    said = {line for message in before.messages for line in content_text(message.shown).split("\n")}
    functions = [cast(dict[str, object], one["function"]) for one in before.later]
    hidden: dict[str, object] = {str(one["name"]): one for one in functions if function_line(one) not in said}
    return Later(list(before.later), hidden)


def _found(content: Sequence[Block | Seen], later: Later) -> Iterator[TextBlock | ImageBlock]:
    """Write references to tools, and changes of them, as text."""
    for kind, run in itertools.groupby(content, type):
        if kind is ToolReference:
            found = [later.named(block.tool_name) for block in run if isinstance(block, ToolReference)]
            yield TextBlock(type="text", text=functions_text(found))
        elif kind is ToolChange:
            yield TextBlock(
                type="text", text=_changed([block for block in run if isinstance(block, ToolChange)], later)
            )
        else:
            yield from (block for block in run if isinstance(block, TextBlock | ImageBlock))


def _changed(changes: Sequence[ToolChange], later: Later) -> str:
    """Write tools that join and leave as text, without tools of a kind that is left out."""
    added, removed = list[object](), list[str]()
    for change in changes:
        tool = change.tool.definition
        name = change.tool.name if tool is None or isinstance(tool, DroppedTool) else tool.name
        if change.type == "tool_removal":
            removed += [] if name is None else [name]
        elif isinstance(tool, Tool | ClientTool):
            added.append(later.add(tool))
        elif name is not None:
            added.append(later.named(name))
    texts = [functions_text(added)] if added else []
    if removed:
        texts.append("\n".join(["<removed_functions>", *removed, "</removed_functions>"]))
    return "\n\n".join(texts)


ALLOWED: dict[str, tuple[type[Wire], ...]] = {
    "system": (TextBlock, ToolChange),
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
}
"""Blocks of a message, by role."""


def _placed(turn: Turn, path: str, later: Later) -> Iterator[Placed]:
    """Translate a turn: an assistant's is one message; a user's has a message for each answer, then its text."""
    if isinstance(turn.content, str):
        yield Placed(ChatMessage(role=turn.role, content=turn.content), f"{path}.content")
        return
    for index, block in enumerate(turn.content):
        if not isinstance(block, DroppedBlock) and not isinstance(block, ALLOWED[turn.role]):
            place = f"{path}.content[{index}]"
            raise ApiError(400, f"{place}: a {turn.role} message has no block of the type {block.type!r}.", param=place)
    seen = list(_found(turn.content, later))
    if turn.role == "assistant":
        thought = "".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock))
        calls = [block.to_call() for block in turn.content if isinstance(block, ToolUseBlock)]
        said = "".join(block.text for block in seen if isinstance(block, TextBlock))
        yield Placed(assistant(said, thought, calls), f"{path}.content")
        return
    results = [(i, block) for i, block in enumerate(turn.content) if isinstance(block, ToolResultBlock)]
    for index, result in results:
        content = result.content if isinstance(result.content, str) else list(_found(result.content, later))
        # An error without text says that it is one.
        shown = joined(content) or ("error" if result.is_error else "")
        answer = ChatMessage(role="tool", content=shown, tool_call_id=result.tool_use_id)
        yield Placed(answer, f"{path}.content[{index}]")
    if seen or not results:
        yield Placed(ChatMessage(role=turn.role, content=joined(seen)), f"{path}.content")


def _choice(choice: Choice | None) -> Literal["auto", "none", "required"] | NamedChoice | None:
    if choice is None or choice.type == "auto":
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name: a choice of the type 'tool' needs it.", param="tool_choice.name")
        return named(choice.name)
    return "none" if choice.type == "none" else "required"


def _head(completion: Begun) -> dict[str, object]:
    return {
        "id": f"msg_{completion.id}",
        "type": "message",
        "role": "assistant",
        "model": completion.request.model,
    }


def _blocks(completion: Completion) -> Iterator[dict[str, object]]:
    message: Message = completion.message
    if thought := message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": thought, "signature": completion.id}
    if text := content_text(message["content"]):
        yield {"type": "text", "text": text}
    yield from _calls(completion)


def _calls(completion: Completion) -> Iterator[dict[str, object]]:
    for made in completion.message.get("tool_calls", ()):
        arguments = cast(str, made["function"]["arguments"])
        yield {"type": "tool_use", "id": made["id"], "name": made["function"]["name"], "input": input_of(arguments)}


def input_of(arguments: str) -> Mapping[str, JSON]:
    """Translate the text of a call's arguments; one that is no JSON object that clients can send back stays text."""
    try:
        value: JSON = DECODER.decode(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) and is_sendable(value) else {UNPARSED: arguments}


def _end(completion: Completion) -> dict[str, JSON]:
    reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(completion.finish_reason, "end_turn")
    if completion.matched is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.matched}


def _usage(completion: Completion) -> dict[str, JSON]:
    return _tokens(len(completion.prompt_ids), completion.cached_tokens, len(completion.ids))


def _tokens(prompt: int, cached: int = 0, sampled: int = 0) -> dict[str, JSON]:
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": sampled,
    }


def _event(kind: str, **members: object) -> bytes:
    return event({"type": kind, **members}, kind)
