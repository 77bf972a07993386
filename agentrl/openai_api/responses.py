"""OpenAI's Responses: a conversation as items of messages, reasoning, calls and their outputs."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from agentrl.chat.message import content_text
from agentrl.openai_api.chat_completions import openai_error
from agentrl.openai_api.completion import Begun, Completion
from agentrl.openai_api.dialect import (
    Conversation,
    Kept,
    Offered,
    Placed,
    Translated,
    assistant,
    call,
    checked,
    event,
    functions_text,
    named,
)
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.fields import Api, row_of
from agentrl.openai_api.images import Image
from agentrl.openai_api.request import (
    AllowedChoice,
    AllowedFunctions,
    ChatMessage,
    ChatRequest,
    NamedChoice,
    Part,
    TextFormat,
    ToolCall,
    Tools,
    choice_kind,
    content_kind,
    refuse_twice,
)
from agentrl.openai_api.responses_tools import (
    AnyTool,
    Declared,
    arguments_of,
    call_of,
    flat,
    search_is_ours,
)
from agentrl.openai_api.wire import DROPPED, Dropped, Listed, Reading, Wire, short, tagged, validated
from agentrl.openai_api.writer import EventWriter, pieces
from agentrl.system.json_value import JSON

CONTENT = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""The member with a call's text, and its events, by the item's type."""
ENCRYPTED = "reasoning.encrypted_content"


class TextPart(Wire):
    """Part of a message, of an output or of reasoning."""

    apis, place = "responses", "part"
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> TextPart:
        member = "refusal" if self.type == "refusal" else "text"
        if getattr(self, member) is None:
            raise ValueError(f"a part of the type {self.type!r} needs {member!r}")
        return self

    @property
    def words(self) -> str:
        """The part's text."""
        return self.text or self.refusal or ""


class ImagePart(Wire):
    """Image of a user's message or of an output, as a data URL."""

    apis, place = "responses", "part"
    type: Literal["input_image"]
    image_url: Image = Field(default=None, validate_default=True)  # None: of a file_id, which is refused as such.


Seen = Annotated[
    Annotated[TextPart, Tag(":text")] | Annotated[ImagePart, Tag(":image")],
    Discriminator(lambda part: ":image" if isinstance(part, dict) and part.get("type") == "input_image" else ":text"),
]
Parts = Annotated[Annotated[str, Tag(":str")] | Annotated[Listed[Seen], Tag(":list")], Discriminator(content_kind)]


class MessageItem(Wire):
    """A message."""

    apis, place = "responses", "item"
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts

    @property
    def parts(self) -> Sequence[TextPart | ImagePart]:
        """The content's parts."""
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class CallItem(Wire):
    """A call of a function."""

    apis, place = "responses", "item"
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(Wire):
    """A call of a tool of the type `custom`."""

    apis, place = "responses", "item"
    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str
    namespace: str | None = None
    input: str


class KindCallItem(Wire):
    """A call of a tool whose kind stands for its name."""

    apis, place = "responses", "item"
    type: Literal["tool_search_call", "local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str = Field(min_length=1)
    arguments: dict[str, object] | None = None
    action: dict[str, object] | None = None
    operation: dict[str, object] | None = None


class OutputItem(Wire):
    """The answer to a call."""

    apis, place = "responses", "item"
    type: Literal[
        "function_call_output", "custom_tool_call_output", "local_shell_call_output", "apply_patch_call_output"
    ]
    call_id: str
    output: Parts


class ShellOutputItem(Wire):
    """The answer to commands of the tool `shell`: what each wrote, and how it ended."""

    apis, place = "responses", "item"
    type: Literal["shell_call_output"]
    call_id: str
    output: Listed[dict[str, object]]


class FoundToolsItem(Wire):
    """The answer to a search of tools, which may be called from here on; or tools that a client adds."""

    apis, place = "responses", "item"
    type: Literal["tool_search_output", "additional_tools"]
    call_id: str | None = None
    role: str | None = None
    tools: Listed[AnyTool]


class ReasoningItem(Wire):
    """Reasoning of the policy."""

    apis, place = "responses", "item"
    type: Literal["reasoning"]
    summary: Listed[TextPart] | None = None
    content: Listed[TextPart] | None = None
    encrypted_content: str | None = None
    id: str | None = None

    @property
    def is_empty(self) -> bool:
        """True: its text is the text that was sent under its id, if any."""
        return not self.content and not self.encrypted_content


class ItemReference(Wire):
    """An item of an answer that this session has kept."""

    apis, place = "responses", "item"
    type: Literal["item_reference"]
    id: str


class DroppedItem(Dropped):
    """Item of a kind that is left out."""

    place = "item.type"


Answer = OutputItem | ShellOutputItem | FoundToolsItem
Said = MessageItem | CallItem | CustomCallItem | KindCallItem | ReasoningItem
Item = Annotated[
    Annotated[MessageItem, Tag(":message")]
    | Annotated[CallItem, Tag(":call")]
    | Annotated[CustomCallItem, Tag(":custom")]
    | Annotated[KindCallItem, Tag(":kind")]
    | Annotated[OutputItem, Tag(":output")]
    | Annotated[ShellOutputItem, Tag(":shell")]
    | Annotated[FoundToolsItem, Tag(":found")]
    | Annotated[ReasoningItem, Tag(":reasoning")]
    | Annotated[ItemReference, Tag(":reference")]
    | Annotated[DroppedItem, Tag(DROPPED)],
    tagged(
        "responses",
        "item.type",
        "message",
        message="message",
        call="function_call",
        custom="custom_tool_call",
        kind="tool_search_call local_shell_call shell_call apply_patch_call",
        output="function_call_output custom_tool_call_output local_shell_call_output apply_patch_call_output",
        shell="shell_call_output",
        found="tool_search_output additional_tools",
        reasoning="reasoning",
        reference="item_reference",
    ),
]
Input = Annotated[Annotated[str, Tag(":str")] | Annotated[Listed[Item], Tag(":list")], Discriminator(content_kind)]


class NamedTool(Wire):
    """A `tool_choice` that names a tool."""

    apis, place = "responses", "tool_choice"
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Wire):
    """A `tool_choice` that leaves some of the tools."""

    apis, place = "responses", "tool_choice"
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Listed[NamedTool] = Field(min_length=1)


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag(":str")]
    | Annotated[AllowedTools, Tag(":allowed")]
    | Annotated[NamedTool, Tag(":named")],
    Discriminator(choice_kind),
]


class TextOptions(Wire):
    """How text is written."""

    apis, place = "responses", "text"
    format: TextFormat | None = None


def _known_extras(names: list[str], info: ValidationInfo[Reading | None]) -> list[str]:
    """Leave out further contents of an answer that no answer here has."""
    for name in names:
        row = row_of("responses", "include", name)
        if name != ENCRYPTED and info.context is not None and row is not None:
            if info.context.strict:
                raise ValueError(f"expected {ENCRYPTED}")
            info.context.drop(name, row.why)
    return names


class ResponsesRequest(Wire):
    """Body of POST responses."""

    apis, place = "responses", "request"
    model: str = Field("policy", max_length=256)
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Listed[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    store: bool | None = None
    stream: bool | None = None
    include: Annotated[Listed[str], AfterValidator(_known_extras)] | None = None
    text: TextOptions | None = None
    metadata: object = None


class Output(Wire):
    """Items of an answer."""

    output: Listed[Item]


class Responses:
    """The dialect of POST responses."""

    api: Api = "responses"
    path = "v1/responses"

    def read(self, body: JSON, reading: Reading, kept: Kept) -> ChatRequest:
        asked = validated(body, ResponsesRequest, reading)
        tools = asked.tools or ()
        before = _continued(asked, kept)
        # Tools that earlier searches found stay; `tools` are declared with each request.
        declared = Declared(reading.drop, dict(before.offered), list(before.later))
        functions: Tools = list(declared.functions(tools, deferred=not search_is_ours(tools)))
        refuse_twice(declared.named)
        if isinstance(asked.input, str):
            new = [Placed(ChatMessage(role="user", content=asked.input), "input")]
        else:
            new = list(_placed(_resolved(asked.input, kept), declared))
        if not asked.input:
            raise ApiError(400, "input: expected at least one item.", param="input", code="invalid_value")
        carried = [*(Placed(message, "previous_response_id") for message in before.messages), *new]
        placed = list(carried)
        if asked.instructions:
            placed.insert(0, Placed(ChatMessage(role="system", content=asked.instructions), "instructions"))
        request = Translated.model_construct(
            model=asked.model,
            messages=[one.message for one in placed],
            tools=functions or None,
            tool_choice=_choice(asked.tool_choice),
            parallel_tool_calls=asked.parallel_tool_calls,
            response_format=asked.text.format.to_response_format if asked.text and asked.text.format else None,
            places=dict.fromkeys(("response_format", "response_format.json_schema"), "text.format"),
            max_tokens=asked.max_output_tokens,
            stream=asked.stream,
            carried=None if asked.store is False else tuple(one.message for one in carried),
            given=asked,
            later=declared.later,
            offered=declared.offered,
        )
        return checked(request, placed)

    def turns(self, answer: JSON, reading: Reading) -> list[ChatMessage]:
        items = validated({"output": answer}, Output, reading).output
        return [one.message for one in _placed(items, Declared(reading.drop))]

    def answer(self, completion: Completion) -> dict[str, object]:
        """Make the `response` object."""
        return _response(completion, _status(completion), list(_items(completion)))

    def writer(self, begun: Begun) -> EventWriter:
        return _Items(begun)

    def error(self, error: ApiError) -> dict[str, JSON]:
        return openai_error(error)

    def error_event(self, error: ApiError) -> bytes:
        """Write the error as the last event of a stream, in both forms that clients look for."""
        about: dict[str, JSON] = {"code": error.code, "message": error.message, "param": error.param}
        return event({"type": "error", "sequence_number": 0, **about, **openai_error(error)}, "error")


class _Items(EventWriter):
    """Writes the events: the response's begin, each item in pieces, the response's end."""

    def __init__(self, begun: Begun) -> None:
        super().__init__(begun)
        self._number = -1
        self._index = 0
        self._kind = ""
        """Kind of the item that is open: reasoning or message."""
        self._texts: list[str] = []
        """Pieces of its text."""

    def open(self, begun: Begun) -> Iterator[bytes]:
        response = _response(begun, "in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def reason(self, piece: str) -> Iterator[bytes]:
        yield from self._piece("reasoning", piece)

    def say(self, piece: str) -> Iterator[bytes]:
        yield from self._piece("message", piece)

    def close(self, completion: Completion) -> Iterator[bytes]:
        status, items = _status(completion), list(_items(completion))
        calls = [item for item in items if item["type"] not in ("reasoning", "message")]
        yield from self._done("completed" if calls else status)
        for item in calls:
            added = {**item, "status": "in_progress"}
            kind = str(item["type"])
            if kind in CONTENT:
                added[CONTENT[kind][0]] = ""
            yield self._event("response.output_item.added", output_index=self._index, item=added)
            if kind in CONTENT:
                yield from self._content(item, *CONTENT[kind])
            yield self._event("response.output_item.done", output_index=self._index, item=item)
            self._index += 1
        yield self._event(f"response.{status}", response=_response(completion, status, items))

    def _content(self, item: Mapping[str, object], field: str, name: str) -> Iterator[bytes]:
        """Write the content of a call."""
        at, text = {"output_index": self._index, "item_id": item["id"]}, str(item[field])
        for piece in pieces(text):
            yield self._event(f"{name}.delta", **at, delta=piece)
        called = {"name": item["name"]} if field == "arguments" else {}
        yield self._event(f"{name}.done", **at, **called, **{field: text})

    def _piece(self, kind: str, piece: str) -> Iterator[bytes]:
        if self._kind != kind:
            yield from self._done("completed")
            self._kind = kind
            item = {**_item(self.begun, kind, "", "in_progress"), "content": []}
            yield self._event("response.output_item.added", output_index=self._index, item=item)
            yield self._event("response.content_part.added", **self._at(), part=self._part(""))
        self._texts.append(piece)
        yield self._event(f"{_PARTS[kind]}.delta", **self._at(), delta=piece, **_more(kind))

    def _done(self, status: str) -> Iterator[bytes]:
        """End the item that is open."""
        if not self._kind:
            return
        text, at = "".join(self._texts), self._at()
        yield self._event(f"{_PARTS[self._kind]}.done", **at, text=text, **_more(self._kind))
        yield self._event("response.content_part.done", **at, part=self._part(text))
        item = _item(self.begun, self._kind, text, status)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._index, self._kind = self._index + 1, ""
        self._texts.clear()

    def _at(self) -> dict[str, object]:
        id = _item(self.begun, self._kind, "", "")["id"]
        return {"output_index": self._index, "item_id": id, "content_index": 0}

    def _part(self, text: str) -> object:
        (part,) = cast(list[dict[str, object]], _item(self.begun, self._kind, text, "")["content"])
        return part

    def _event(self, kind: str, **members: object) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **members}, kind)


_PARTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


def _more(kind: str) -> dict[str, object]:
    return {"logprobs": []} if kind == "message" else {}


def _continued(asked: ResponsesRequest, kept: Kept) -> Conversation:
    """Return the conversation that a request continues."""
    if (id := asked.previous_response_id) is None:
        return Conversation(())
    before = kept.get(id.removeprefix("resp_"))
    if before is None:
        message = (
            f"previous_response_id: this session has kept no answer {id[:80]!r}; answers are kept unless store is false"
        )
        raise ApiError(400, f"{message}.", param="previous_response_id", code="previous_response_not_found")
    return before


def _choice(
    choice: Literal["auto", "none", "required"] | NamedTool | AllowedTools | None,
) -> Literal["auto", "none", "required"] | NamedChoice | AllowedChoice | None:
    if isinstance(choice, NamedTool):
        return named(flat(choice.name, choice.namespace))
    if isinstance(choice, AllowedTools):
        tools = [named(flat(one.name, one.namespace)) for one in choice.tools]
        allowed = AllowedFunctions(mode=choice.mode, tools=tools)
        return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _resolved(items: Sequence[Item], kept: Kept) -> Iterator[Item]:
    """Put the items that references name in their place, and the text of reasoning that a client names by its id."""
    known: dict[str, Item] = {}
    if any(isinstance(item, ItemReference) or (isinstance(item, ReasoningItem) and item.is_empty) for item in items):
        for id, conversation in kept.items():
            known |= _kept_items(id, conversation.messages[-1])
    for index, item in enumerate(items):
        if isinstance(item, ReasoningItem) and item.is_empty:
            yield known.get(item.id or "", item)
        elif not isinstance(item, ItemReference):
            yield item
        elif item.id in known:
            yield known[item.id]
        else:
            path = f"input[{index}].id"
            message = f"{path}: this session has kept no item {short(item.id)}; items are kept unless store is false."
            raise ApiError(400, message, param=path, code="invalid_value")


def _kept_items(id: str, answer: ChatMessage) -> Iterator[tuple[str, Item]]:
    """List the items of an answer with their ids, as `_items` named them."""
    if answer.reasoning_content:
        part = TextPart(type="reasoning_text", text=answer.reasoning_content)
        yield f"rs_{id}", ReasoningItem(type="reasoning", content=[part])
    yield f"msg_{id}", MessageItem(role="assistant", content=content_text(answer.shown))
    for one in answer.tool_calls or ():
        made = CallItem.model_construct(
            type="function_call", call_id=one.id, name=one.function.name, arguments=one.function.arguments
        )
        yield f"fc_{one.id}", made


def _placed(items: Iterable[Item], declared: Declared) -> Iterator[Placed]:
    """Translate items: reasoning, text and calls that follow one another are one assistant message."""
    turn, kinds = dict[str, Said](), set[type[Said]]()
    for index, item in enumerate(items):
        if isinstance(item, DroppedItem | ItemReference):
            continue
        said, called = kinds - {ReasoningItem}, kinds - {ReasoningItem, MessageItem}
        ends = isinstance(item, Answer) or (isinstance(item, MessageItem) and item.role != "assistant")
        # Text or reasoning after an answer's text begins another answer. Text after calls is of the same answer, as
        # theirs are still to come: clients do not keep the order.
        more = isinstance(item, ReasoningItem) or (isinstance(item, MessageItem) and not called)
        if turn and (ends or (said and more)):
            yield _turn(turn)
            turn, kinds = {}, set()
        path = f"input[{index}]"
        if isinstance(item, Answer):
            yield Placed(_answer(item, declared), path)
        elif isinstance(item, MessageItem) and item.role != "assistant":
            yield Placed(ChatMessage(role=item.role, content=_shown(item.content)), path)
        else:
            turn[path] = item
            kinds.add(type(item))
    if turn:
        yield _turn(turn)


def _answer(item: Answer, declared: Declared) -> ChatMessage:
    """Translate an answer to a call. It declares the tools that a search found, after the prompt."""
    if isinstance(item, FoundToolsItem):
        found = list(declared.functions(item.tools, deferred=True))
        declared.later += found
        text = functions_text([one["function"] for one in found])
        if item.call_id is None:
            return ChatMessage(role="developer", content=text)
        return ChatMessage(role="tool", content=text, tool_call_id=item.call_id)
    shown = json.dumps(item.output, ensure_ascii=False) if isinstance(item, ShellOutputItem) else _shown(item.output)
    return ChatMessage(role="tool", content=shown, tool_call_id=item.call_id)


def _turn(items: dict[str, Said]) -> Placed:
    """Join the items of one answer, which are given by their paths."""
    thought, said, calls = "", "", list[ToolCall]()
    for path, item in items.items():
        if isinstance(item, ReasoningItem):
            thought += _reasoning(item, path)
        elif not isinstance(item, MessageItem):
            calls.append(_call(item))
        elif any(isinstance(part, ImagePart) for part in item.parts):
            raise ApiError(400, f"{path}: an assistant message has no image.", param=path, code="invalid_value")
        else:
            said += "".join(part.words for part in item.parts if isinstance(part, TextPart))
    return Placed(assistant(said, thought, calls), next(reversed(items)))


def _call(item: CallItem | CustomCallItem | KindCallItem) -> ToolCall:
    if isinstance(item, KindCallItem):
        kind = item.type.removesuffix("_call")
        return call(item.call_id, kind, arguments_of(kind, item.arguments or item.action or item.operation))
    if isinstance(item, CallItem):
        arguments = item.arguments
    else:
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
    return call(item.call_id, flat(item.name, item.namespace), arguments)


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


def _given(completion: Begun) -> ResponsesRequest:
    assert isinstance(completion.request, Translated) and isinstance(completion.request.given, ResponsesRequest)
    return completion.request.given


def _status(completion: Completion) -> Literal["completed", "incomplete"]:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _items(completion: Completion) -> Iterator[dict[str, object]]:
    """Make the output's items; where the answer was cut, the last one is incomplete."""
    message, status = completion.message, _status(completion)
    offered = completion.request.offered if isinstance(completion.request, Translated) else {}
    thought, text = message.get("reasoning_content"), content_text(message["content"])
    calls = bool(message.get("tool_calls"))
    if thought:
        yield _item(completion, "reasoning", thought, "completed" if text or calls else status)
    if text:
        yield _item(completion, "message", text, "completed" if calls else status)
    for one in message.get("tool_calls", ()):
        name, arguments = one["function"]["name"], str(one["function"]["arguments"])
        made = call_of(offered.get(name, Offered("function", name)), arguments)
        if made is None:
            made = {"type": "function_call", "name": name, "arguments": arguments}
        yield {"id": f"fc_{one['id']}", "call_id": one["id"], "status": "completed", **made}


def _item(begun: Begun, kind: str, text: str, status: str) -> dict[str, object]:
    """Make the item of reasoning, or of the message."""
    if kind == "message":
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        head = {"type": "message", "id": f"msg_{begun.id}", "role": "assistant"}
        return {**head, "content": content, "status": status}
    is_sealed = bool(text) and ENCRYPTED in (_given(begun).include or ())
    return {
        "type": "reasoning",
        "id": f"rs_{begun.id}",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": base64.b64encode(text.encode()).decode() if is_sealed else None,
        "status": status,
    }


def _response(completion: Begun, status: str, items: list[dict[str, object]]) -> dict[str, object]:
    asked = _given(completion)
    usage: dict[str, object] | None = None
    if isinstance(completion, Completion) and status != "in_progress":
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
        "tool_choice": choice.model_dump(exclude_none=True) if isinstance(choice, Wire) else choice or "auto",
        "tools": [one.model_dump(exclude_none=True) for one in asked.tools or () if not isinstance(one, Dropped)],
        "top_p": None,
        "truncation": "disabled",
        "usage": usage,
        "metadata": asked.metadata or {},
    }
