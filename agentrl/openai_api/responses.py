"""OpenAI's Responses: a conversation as items of messages, reasoning, calls and their outputs."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, cast

from pydantic import Discriminator, Field, Tag

from agentrl.chat.message import content_text
from agentrl.openai_api.chat_completions import openai_error
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
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    Name,
    NoEffect,
    Part,
    Schema,
    Strict,
    TextFormat,
    ToolCall,
    content_kind,
    read_body,
)
from agentrl.system.json_value import JSON

RUN_DECIDES = ("temperature", "top_p", "reasoning")
"""Fields that never hold, beside `text.verbosity`: the run says how the policy is sampled."""
DEFAULTS: dict[str, tuple[JSON, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "max_tool_calls": (),
    "context_management": ([],),
}
"""Fields that would change the result, and the values (null besides) with which they do not."""
CONTENT = {"arguments": "response.function_call_arguments", "input": "response.custom_tool_call_input"}
"""Events of a call's text, by the item's field."""
Event = tuple[str, dict[str, object]]
"""An event's type and its members."""
ENCRYPTED = "reasoning.encrypted_content"
FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of the function that stands for a tool of the type `custom`, whose input is text."""


class TextPart(Strict):
    """Part of a message, of an output or of reasoning."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: NoEffect = None
    logprobs: NoEffect = None

    @property
    def words(self) -> str:
        """The part's text."""
        return self.text or self.refusal or ""


class ImagePart(Strict):
    """Image of a user's message or of an output, as a data URL."""

    type: Literal["input_image"]
    image_url: Image = Field(default=None, validate_default=True)  # None: of a file_id, which is refused as such.
    file_id: NoEffect = None
    detail: NoEffect = None


Seen = Annotated[
    Annotated[TextPart, Tag(":text")] | Annotated[ImagePart, Tag(":image")],
    Discriminator(lambda part: ":image" if isinstance(part, dict) and part.get("type") == "input_image" else ":text"),
]
Parts = Annotated[Annotated[str, Tag(":str")] | Annotated[list[Seen], Tag(":list")], Discriminator(content_kind)]


class MessageItem(Strict):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: NoEffect = None
    status: NoEffect = None
    phase: NoEffect = None

    @property
    def parts(self) -> Sequence[TextPart | ImagePart]:
        """The content's parts."""
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class CallItem(Strict):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str
    id: NoEffect = None
    status: NoEffect = None
    namespace: NoEffect = None


class CustomCallItem(Strict):
    """A call of a tool of the type `custom`."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str
    input: str
    id: NoEffect = None
    status: NoEffect = None


class OutputItem(Strict):
    """The answer to a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts
    id: NoEffect = None
    status: NoEffect = None


class ReasoningItem(Strict):
    """Reasoning of the policy."""

    type: Literal["reasoning"]
    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None
    encrypted_content: str | None = None
    id: NoEffect = None
    status: NoEffect = None


def _item_kind(item: object) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "no object"
    return ":output" if kind in ("function_call_output", "custom_tool_call_output") else f":{kind}"


Item = Annotated[
    Annotated[MessageItem, Tag(":message")]
    | Annotated[CallItem, Tag(":function_call")]
    | Annotated[CustomCallItem, Tag(":custom_tool_call")]
    | Annotated[OutputItem, Tag(":output")]
    | Annotated[ReasoningItem, Tag(":reasoning")],
    Discriminator(_item_kind),
]
Input = Annotated[Annotated[str, Tag(":str")] | Annotated[list[Item], Tag(":list")], Discriminator(content_kind)]


class Tool(Strict):
    """Tool declaration; one of the type `custom` takes text."""

    type: Literal["function", "custom"]
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    format: NoEffect = None
    defer_loading: NoEffect = None

    def to_function(self) -> dict[str, object]:
        """Translate."""
        return function(self.name, self.description, FREE if self.type == "custom" else self.parameters)


class NamedTool(Strict):
    """A `tool_choice` that names a tool."""

    type: Literal["function", "custom"]
    name: str


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag(":str")] | Annotated[NamedTool, Tag(":named")],
    Discriminator(lambda choice: ":str" if isinstance(choice, str) else ":named"),
]


class TextOptions(Strict):
    """How text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Strict):
    """Body of POST responses without the fields of `DEFAULTS`."""

    model: str = Field("policy", max_length=256)
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    store: bool | None = None
    stream: bool | None = None
    stream_options: NoEffect = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    reasoning: NoEffect = None
    text: TextOptions | None = None

    metadata: NoEffect = None
    user: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    service_tier: NoEffect = None
    client_metadata: NoEffect = None


class Responses:
    """The dialect of POST responses."""

    path = "v1/responses"
    fields = frozenset({*ResponsesRequest.model_fields, *DEFAULTS})

    def read(self, body: bytes, kept: Kept) -> ChatRequest:
        asked = read_body(body, ResponsesRequest, DEFAULTS)
        before = [Placed(message, "previous_response_id") for message in _continued(asked, kept)]
        if isinstance(asked.input, str):
            new = [Placed(ChatMessage(role="user", content=asked.input), "input")]
        else:
            new = list(_placed(asked.input))
        if not asked.input:
            raise ApiError(400, "input: expected at least one item.", param="input", code="invalid_value")
        carried, choice = [*before, *new], asked.tool_choice
        placed = list(carried)
        if asked.instructions:
            placed.insert(0, Placed(ChatMessage(role="system", content=asked.instructions), "instructions"))
        request = Translated.model_construct(
            model=asked.model,
            messages=[one.message for one in placed],
            tools=[tool.to_function() for tool in asked.tools] if asked.tools else None,
            tool_choice=named(choice.name) if isinstance(choice, NamedTool) else choice,
            parallel_tool_calls=asked.parallel_tool_calls,
            response_format=asked.text.format.to_response_format if asked.text and asked.text.format else None,
            places=dict.fromkeys(("response_format", "response_format.json_schema"), "text.format"),
            max_tokens=asked.max_output_tokens,
            stream=asked.stream,
            ignored=tuple(_ignored(asked)),
            carried=None if asked.store is False else tuple(one.message for one in carried),
            given=asked,
        )
        return checked(request, placed)

    def answer(self, completion: Completion) -> dict[str, object]:
        """Make the `response` object."""
        return _response(completion, _status(completion), list(_items(completion)))

    def events(self, completion: Completion) -> Iterator[bytes]:
        """Make the events: the response's begin, each item in pieces, the response's end."""
        items, status = list(_items(completion)), _status(completion)
        begun = _response(completion, "in_progress", [])
        events: list[Event] = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
        for index, item in enumerate(items):
            added = {**item, "status": "in_progress", **dict.fromkeys(CONTENT.keys() & item.keys(), "")}
            if "content" in item:
                added["content"] = []
            events.append(("response.output_item.added", {"output_index": index, "item": added}))
            events += _item_events({"output_index": index, "item_id": item["id"]}, item)
            events.append(("response.output_item.done", {"output_index": index, "item": item}))
        events.append((f"response.{status}", {"response": _response(completion, status, items)}))
        for number, (kind, members) in enumerate(events):
            yield event({"type": kind, "sequence_number": number, **members}, kind)

    def error(self, error: ApiError) -> dict[str, JSON]:
        return openai_error(error)

    def error_event(self, error: ApiError) -> bytes:
        """Write the error as the last event of a stream, in both forms that clients look for."""
        about: dict[str, JSON] = {"code": error.code, "message": error.message, "param": error.param}
        return event({"type": "error", "sequence_number": 0, **about, **openai_error(error)}, "error")


def _item_events(at: Mapping[str, object], item: Mapping[str, object]) -> Iterator[Event]:
    """Make the events of an item's content, after the item was added and before it is done."""
    field = next((name for name in CONTENT if name in item), None)
    if field is not None:
        text, name = str(item[field]), CONTENT[field]
        for piece in pieces(text):
            yield f"{name}.delta", {**at, "delta": piece}
        called = {"name": item["name"]} if field == "arguments" else {}
        yield f"{name}.done", {**at, **called, field: text}
        return
    (part,) = cast(list[dict[str, object]], item["content"])
    at, text = {**at, "content_index": 0}, str(part["text"])
    spoken = item["type"] == "message"
    name = "response.output_text" if spoken else "response.reasoning_text"
    more: dict[str, object] = {"logprobs": []} if spoken else {}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    for piece in pieces(text):
        yield f"{name}.delta", {**at, "delta": piece, **more}
    yield f"{name}.done", {**at, "text": text, **more}
    yield "response.content_part.done", {**at, "part": part}


def _continued(asked: ResponsesRequest, kept: Kept) -> Sequence[ChatMessage]:
    """Return the conversation that a request continues."""
    if (id := asked.previous_response_id) is None:
        return ()
    before = kept.get(id.removeprefix("resp_"))
    if before is None:
        message = (
            f"previous_response_id: this session has kept no answer {id[:80]!r}; answers are kept unless store is false"
        )
        raise ApiError(400, f"{message}.", param="previous_response_id", code="previous_response_not_found")
    return before


def _ignored(asked: ResponsesRequest) -> Iterator[str]:
    yield from (name for name in RUN_DECIDES if getattr(asked, name) is not None)
    if asked.text is not None and asked.text.verbosity is not None:
        yield "verbosity"
    if any(tool.strict for tool in asked.tools or ()):
        yield "strict"


def _placed(items: Sequence[Item]) -> Iterator[Placed]:
    """Translate items: reasoning, text and calls that follow one another are one assistant message."""
    turn: list[MessageItem | CallItem | CustomCallItem | ReasoningItem] = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        said = any(not isinstance(before, ReasoningItem) for before in turn)
        others = isinstance(item, OutputItem) or (isinstance(item, MessageItem) and item.role != "assistant")
        # Text or reasoning after an answer's text or calls begins another answer.
        if turn and (others or (said and isinstance(item, MessageItem | ReasoningItem))):
            yield _turn(turn, f"input[{index - 1}]")
            turn = []
        if isinstance(item, OutputItem):
            answer = ChatMessage(role="tool", content=_shown(item.output), tool_call_id=item.call_id)
            yield Placed(answer, path)
        elif isinstance(item, MessageItem) and item.role != "assistant":
            yield Placed(ChatMessage(role=item.role, content=_shown(item.content)), path)
        else:
            turn.append(item)
    if turn:
        yield _turn(turn, f"input[{len(items) - 1}]")


def _turn(items: Sequence[MessageItem | CallItem | CustomCallItem | ReasoningItem], path: str) -> Placed:
    """Join the items of one answer."""
    thought = "".join(_reasoning(item, path) for item in items if isinstance(item, ReasoningItem))
    parts = [part for item in items if isinstance(item, MessageItem) for part in item.parts]
    if any(isinstance(part, ImagePart) for part in parts):
        raise ApiError(400, f"{path}: an assistant message has no image.", param=path, code="invalid_value")
    said = "".join(part.words for part in parts if isinstance(part, TextPart))
    calls = [_call(item) for item in items if isinstance(item, CallItem | CustomCallItem)]
    return Placed(assistant(said, thought, calls), path)


def _call(item: CallItem | CustomCallItem) -> ToolCall:
    if isinstance(item, CallItem):
        arguments = item.arguments
    else:
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
    return call(item.call_id, item.name, arguments)


def _reasoning(item: ReasoningItem, path: str) -> str:
    """Return an item's reasoning: its text, or the text in `encrypted_content`, for clients that keep nothing else."""
    if item.content:
        return "".join(part.words for part in item.content)
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, ValueError):
        place = f"{path}.encrypted_content"
        message = f"{place}: expected what this endpoint wrote into a reasoning item."
        raise ApiError(400, message, param=place, code="invalid_value") from None


def _shown(content: str | Sequence[TextPart | ImagePart]) -> str | list[Part]:
    if isinstance(content, str):
        return content
    return [
        Part.model_construct(type="image_url", image_url=part.image_url)
        if isinstance(part, ImagePart)
        else Part(type="text", text=part.words)
        for part in content
    ]


def _asked(completion: Completion) -> ResponsesRequest:
    assert isinstance(completion.request, Translated) and isinstance(completion.request.given, ResponsesRequest)
    return completion.request.given


def _status(completion: Completion) -> Literal["completed", "incomplete"]:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _items(completion: Completion) -> Iterator[dict[str, object]]:
    """Make the output's items."""
    message, asked, status = completion.message, _asked(completion), _status(completion)
    custom = {tool.name for tool in asked.tools or () if tool.type == "custom"}
    if thought := message.get("reasoning_content"):
        encrypted = base64.b64encode(thought.encode()).decode() if ENCRYPTED in (asked.include or ()) else None
        yield {
            "type": "reasoning",
            "id": f"rs_{completion.id}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": thought}],
            "encrypted_content": encrypted,
            "status": status,
        }
    if text := content_text(message["content"]):
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        head = {"type": "message", "id": f"msg_{completion.id}", "role": "assistant"}
        yield {**head, "content": content, "status": status}
    for one in message.get("tool_calls", ()):
        name, arguments = one["function"]["name"], str(one["function"]["arguments"])
        made = {"id": f"fc_{one['id']}", "call_id": one["id"], "name": name, "status": "completed"}
        free = _free_text(arguments) if name in custom else None
        if free is None:
            yield {"type": "function_call", **made, "arguments": arguments}
        else:
            yield {"type": "custom_tool_call", **made, "input": free}


def _free_text(arguments: str) -> str | None:
    """Return the text that a call of a custom tool passes; None where the policy wrote something else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else None


def _response(completion: Completion, status: str, items: list[dict[str, object]]) -> dict[str, object]:
    asked = _asked(completion)
    prompt, sampled = len(completion.prompt_ids), len(completion.ids)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": completion.cached_tokens},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
    choice = asked.tool_choice
    text = asked.text.model_dump(by_alias=True, exclude_unset=True, exclude_none=True) if asked.text else {}
    return {
        "id": f"resp_{completion.id}",
        "object": "response",
        "created_at": completion.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "model": asked.model,
        "output": items,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": asked.store is not False,
        "temperature": None,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        "tools": [tool.model_dump(exclude_none=True) for tool in asked.tools or ()],
        "top_p": None,
        "truncation": "disabled",
        "usage": None if status == "in_progress" else usage,
        "metadata": asked.metadata or {},
    }
