"""Anthropic's Messages: content blocks of text, thinking, tool use and tool results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, cast

from pydantic import Discriminator, Field, Tag

from agentrl.chat.message import DECODER, content_text
from agentrl.openai_api.completion import Completion
from agentrl.openai_api.dialect import (
    Kept,
    Placed,
    Translated,
    assistant,
    call,
    checked,
    event,
    function,
    named,
    pieces,
)
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.images import Image
from agentrl.openai_api.request import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    Name,
    NamedChoice,
    NoEffect,
    Part,
    Schema,
    Stop,
    Strict,
    TextFormat,
    ToolCall,
    content_kind,
    read_body,
)
from agentrl.system.json_value import JSON
from agentrl.trajectory import Message

RUN_DECIDES = ("temperature", "top_p", "top_k", "thinking", "context_management")
"""Fields that never hold, with `output_config.effort`: the run says how the policy is sampled, and no message is taken
out of a prompt."""
UNPARSED = "unparsed_arguments"
"""The member of a call's `input` that holds the text of arguments which are no JSON object."""
KINDS = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


class TextBlock(Strict):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: NoEffect = None
    citations: NoEffect = None


class ImageBlock(Strict):
    """An image, in base64."""

    type: Literal["image"]
    source: Image
    cache_control: NoEffect = None


class ThinkingBlock(Strict):
    """Reasoning of the policy."""

    type: Literal["thinking"]
    thinking: str
    signature: NoEffect = None


class ToolUseBlock(Strict):
    """A call of the policy."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, object]
    cache_control: NoEffect = None
    caller: NoEffect = None

    def to_call(self) -> ToolCall:
        """Translate; arguments that were no JSON object become the text that they were."""
        unparsed = self.input.get(UNPARSED) if len(self.input) == 1 else None
        arguments = unparsed if isinstance(unparsed, str) else json.dumps(self.input, ensure_ascii=False)
        return call(self.id, self.name, arguments)


def _block_kind(block: object) -> str:
    return f":{block.get('type')}" if isinstance(block, dict) else ":no object"


Texts = Annotated[Annotated[str, Tag(":str")] | Annotated[list[TextBlock], Tag(":list")], Discriminator(content_kind)]
Seen = Annotated[
    Annotated[TextBlock, Tag(":text")] | Annotated[ImageBlock, Tag(":image")],
    Discriminator(_block_kind),
]
Result = Annotated[Annotated[str, Tag(":str")] | Annotated[list[Seen], Tag(":list")], Discriminator(content_kind)]


class ToolResultBlock(Strict):
    """The answer to a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Result = ""
    is_error: bool | None = None
    cache_control: NoEffect = None

    @property
    def shown(self) -> str | list[Part]:
        """The answer; an error without text says that it is one."""
        return joined(self.content) or ("error" if self.is_error else "")


Block = Annotated[
    Annotated[TextBlock, Tag(":text")]
    | Annotated[ImageBlock, Tag(":image")]
    | Annotated[ThinkingBlock, Tag(":thinking")]
    | Annotated[ToolUseBlock, Tag(":tool_use")]
    | Annotated[ToolResultBlock, Tag(":tool_result")],
    Discriminator(_block_kind),
]
Blocks = Annotated[Annotated[str, Tag(":str")] | Annotated[list[Block], Tag(":list")], Discriminator(content_kind)]


class Turn(Strict):
    """One message."""

    role: Literal["user", "assistant"]
    content: Blocks


class Tool(Strict):
    """Tool declaration."""

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    cache_control: NoEffect = None
    eager_input_streaming: NoEffect = None

    def to_function(self) -> dict[str, object]:
        """Translate."""
        return function(self.name, self.description, self.input_schema)


class Choice(Strict):
    """How an answer may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(TextFormat):
    """JSON that the text of an answer must fit."""

    type: Literal["json_schema"]


class OutputConfig(Strict):
    """How the policy writes."""

    effort: str | None = None
    format: Format | None = None


class MessagesRequest(Strict):
    """Body of POST messages."""

    model: str = Field("policy", max_length=256)
    max_tokens: int | None = Field(None, ge=1)
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    stop_sequences: list[Stop] | None = Field(None, max_length=MAX_STOPS)
    stream: bool | None = None

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    thinking: NoEffect = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    context_management: NoEffect = None

    metadata: NoEffect = None
    service_tier: NoEffect = None
    cache_control: NoEffect = None
    inference_geo: NoEffect = None
    speed: NoEffect = None


class Messages:
    """The dialect of POST messages."""

    path = "v1/messages"
    fields = frozenset(MessagesRequest.model_fields)

    def read(self, body: bytes, kept: Kept) -> ChatRequest:
        asked = read_body(body, MessagesRequest, {})
        placed = [Placed(ChatMessage(role="system", content=text), "system")] if (text := joined(asked.system)) else []
        config = asked.output_config or OutputConfig()
        format, place = asked.output_format or config.format, "output_config.format"
        if asked.output_format is not None:
            place = "output_format"
        if asked.messages[-1].role == "assistant":
            place = f"messages[{len(asked.messages) - 1}].role"
            said = "the last message is the assistant's, and this endpoint continues no answer that is begun for it"
            raise ApiError(400, f"{place}: {said}; end with a user message.", param=place, code="unsupported_value")
        for index, turn in enumerate(asked.messages):
            placed += _placed(turn, f"messages[{index}]")
        request = Translated.model_construct(
            model=asked.model,
            messages=[one.message for one in placed],
            tools=[tool.to_function() for tool in asked.tools] if asked.tools else None,
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
            ignored=tuple(name for name in RUN_DECIDES if getattr(asked, name) is not None)
            + (("output_config",) if config.effort is not None else ())
            + (("strict",) if any(tool.strict for tool in asked.tools or ()) else ()),
        )
        return checked(request, placed)

    def answer(self, completion: Completion) -> dict[str, object]:
        """Make the `message` object."""
        content = list(_blocks(completion))
        return {**_head(completion), "content": content, **_end(completion), "usage": _usage(completion)}

    def events(self, completion: Completion) -> Iterator[bytes]:
        """Make the events: the message's begin, each block in pieces, the message's end."""
        began = {**_head(completion), "content": [], "stop_reason": None, "stop_sequence": None}
        usage: dict[str, JSON] = {**_usage(completion), "output_tokens": 0}
        yield _event("message_start", message={**began, "usage": usage})
        for index, block in enumerate(_blocks(completion)):
            text = str(block.get("thinking", block.get("text", "")))
            start, delta = {**block, "thinking": "", "signature": ""}, "thinking"
            if block["type"] == "text":
                start, delta = {**block, "text": ""}, "text"
            elif block["type"] == "tool_use":
                start, delta, text = {**block, "input": {}}, "partial_json", json.dumps(block["input"])
            kind = "input_json_delta" if delta == "partial_json" else f"{delta}_delta"
            yield _event("content_block_start", index=index, content_block=start)
            for piece in pieces(text):
                yield _event("content_block_delta", index=index, delta={"type": kind, delta: piece})
            if block["type"] == "thinking":
                signed = {"type": "signature_delta", "signature": block["signature"]}
                yield _event("content_block_delta", index=index, delta=signed)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_end(completion), usage=_usage(completion))
        yield _event("message_stop")

    def error(self, error: ApiError) -> dict[str, JSON]:
        """Make the body: {"type": "error", "error": {"type", "message"}}."""
        kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        # Programs that shorten their context look for these words.
        begin = "prompt is too long: " if error.code == "context_length_exceeded" else ""
        return {"type": "error", "error": {"type": kind, "message": begin + error.message}}

    def error_event(self, error: ApiError) -> bytes:
        """Write the error as the last event of a stream."""
        return event(self.error(error), "error")


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


def _placed(turn: Turn, path: str) -> Iterator[Placed]:
    """Translate a turn: an assistant's is one message; a user's has a message for each answer, then its text."""
    if isinstance(turn.content, str):
        yield Placed(ChatMessage(role=turn.role, content=turn.content), f"{path}.content")
        return
    for index, block in enumerate(turn.content):
        mine = isinstance(block, ToolUseBlock | ThinkingBlock)
        if not isinstance(block, TextBlock) and mine != (turn.role == "assistant"):
            place = f"{path}.content[{index}]"
            raise ApiError(400, f"{place}: a {turn.role} message has no block of the type {block.type!r}.", param=place)
    seen = [block for block in turn.content if isinstance(block, TextBlock | ImageBlock)]
    if turn.role == "assistant":
        thought = "".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock))
        calls = [block.to_call() for block in turn.content if isinstance(block, ToolUseBlock)]
        said = "".join(block.text for block in seen if isinstance(block, TextBlock))
        yield Placed(assistant(said, thought, calls), f"{path}.content")
        return
    results = [(i, block) for i, block in enumerate(turn.content) if isinstance(block, ToolResultBlock)]
    for index, result in results:
        answer = ChatMessage(role="tool", content=result.shown, tool_call_id=result.tool_use_id)
        yield Placed(answer, f"{path}.content[{index}]")
    if seen or not results:
        yield Placed(ChatMessage(role="user", content=joined(seen)), f"{path}.content")


def _choice(choice: Choice | None) -> Literal["auto", "none", "required"] | NamedChoice | None:
    if choice is None or choice.type == "auto":
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name: a choice of the type 'tool' needs it.", param="tool_choice.name")
        return named(choice.name)
    return "none" if choice.type == "none" else "required"


def _head(completion: Completion) -> dict[str, object]:
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
    for made in message.get("tool_calls", ()):
        arguments = cast(str, made["function"]["arguments"])
        yield {"type": "tool_use", "id": made["id"], "name": made["function"]["name"], "input": _input(arguments)}


def _input(arguments: str) -> Mapping[str, JSON]:
    try:
        value: JSON = DECODER.decode(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def _end(completion: Completion) -> dict[str, JSON]:
    reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(completion.finish_reason, "end_turn")
    if completion.matched is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.matched}


def _usage(completion: Completion) -> dict[str, JSON]:
    return {
        "input_tokens": len(completion.prompt_ids) - completion.cached_tokens,
        "cache_read_input_tokens": completion.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(completion.ids),
    }


def _event(kind: str, **members: object) -> bytes:
    return event({"type": kind, **members}, kind)
