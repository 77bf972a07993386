"""Records of a log, read as calls of a model: an API's request and its answer, each as it went over the wire.

The requests and answers of all three APIs are read by `agentrl.openai_api`, as its endpoint reads them. Around them
stand the members that logs have: ids, times, sessions, feedback (`feedback`). Spans of OpenTelemetry become such
bodies first (`spans`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import cast

from agentrl.chat.message import content_text
from agentrl.data.messages import FLAGS, with_our_names
from agentrl.openai_api.chat_completions import ChatCompletions
from agentrl.openai_api.dialect import Conversation as Kept
from agentrl.openai_api.dialect import Dialect, Translated
from agentrl.openai_api.fields import Api, fields_of
from agentrl.openai_api.history import Defaults, defaults_of
from agentrl.openai_api.messages import Messages
from agentrl.openai_api.request import ChatMessage
from agentrl.openai_api.responses import Responses
from agentrl.openai_api.wire import Reading, parsed
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from data_prep.conversation_formats import BadConversation, conversation
from data_prep.records import Record, opened
from data_prep.tool_conversations import MESSAGE, SERVED, checked
from data_prep.traces.runs import call_of, run_kind
from data_prep.traces.sessions import ROOT, Call, Tree, Whole
from data_prep.traces.streams import assembled, is_stream

Fields = Mapping[str, JSON]

DIALECTS: dict[Api, Dialect] = {"chat": ChatCompletions(), "messages": Messages(), "responses": Responses()}
PROMPT: dict[Api, tuple[str, ...]] = {
    "chat": ("messages", "tools"),
    "messages": ("messages", "system", "tools", "thread"),
    "responses": ("input", "instructions", "tools", "previous_response_id"),
}
"""Members of a request that its prompt is made of; all others are about how the answer was sampled."""
ELSEWHERE: dict[Api, tuple[str, ...]] = {
    "chat": ("functions", "documents", "chat_template"),
    "messages": (),
    "responses": ("prompt",),
}
"""Members that change the prompt in a way that no reader knows."""

SPANS = "opentelemetry"
"""The form of calls that spans were written as."""
RUNS = "langsmith"
"""The form of calls that are runs of LangSmith."""
WHOLE = "conversation"
"""The form of calls that are the answers in a whole conversation."""
REQUESTS = ("request", "request_body", "requestBody", "kwargs", "input", "inputs")
RESPONSES = ("response", "response_body", "responseBody", "output", "outputs", "completion")
INNER = ("body", "json")
SESSIONS = (
    *("session", "session_id", "sessionId", "conversation", "conversation_id", "conversationId", "thread_id"),
    *("threadId", "chat_id", "Helicone-Session-Id", "litellm_session_id", "gen_ai.conversation.id", "session.id"),
)
TRACES = ("trace", "trace_id", "traceId", "litellm_trace_id")
IDS = (
    *("id", "call", "call_id", "callId", "request_id", "requestId", "response_id", "responseId", "span_id", "spanId"),
    *("custom_id", "litellm_call_id"),
)
TIMES = (
    *("time", "timestamp", "start_time", "startTime", "began", "created_at", "createdAt", "created"),
    *("request_created_at", "startTimeUnixNano", "date"),
)
ABOUT = ("metadata", "request_properties", "properties", "litellm_params", "session_metadata")
"""Members that hold further members of a record, or of a request."""
LISTS = ("data", "observations", "calls", "records", "generations", "traces", "scores", "runs", "child_runs")
"""Members that hold records of their own."""


class Around(Record):
    """Record of records, without these: what is said of all of them."""


class Waits(Exception):
    """The call goes on from an answer that has not been read yet."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class Later(Exception):
    """The call is of a conversation that a server keeps, whose calls are read by their time when all are known."""

    def __init__(self, conversation: str, time: float | None) -> None:
        super().__init__(conversation)
        self.conversation, self.time = conversation, time


@dataclass(slots=True)
class Logged:
    """A call as a record has it."""

    api: Api
    body: Fields
    """The request's members."""
    answers: list[JSON]
    """Each as `Dialect.turns` takes it."""
    response: Fields
    follows: str | None
    """Id of the answer that a server kept, and from which the request goes on."""
    own: bool
    """True: the request is an object of its own, so that its other members are known to be a request's."""


@dataclass(slots=True)
class Answered:
    """A call whose answer a server keeps, so that another request may go on from it."""

    call: Call
    shown: int
    """Place of prompt and answer in the tree of messages as they were written."""
    instructions: list[Message]
    """First message of the prompt, if it is of `instructions`: the next request replaces it."""
    sent: list[str]
    """Ids of the answer's calls, as the next request names them."""

    def last(self) -> ChatMessage:
        """Return the last turn as the server keeps it."""
        made = ChatMessage.model_validate(self.call.turns[-1])
        calls = [one.model_copy(update={"id": id}) for one, id in zip(made.tool_calls or (), self.sent, strict=True)]
        return made.model_copy(update={"tool_calls": calls or None})


@dataclass(slots=True)
class Reader:
    """Reads records one after another."""

    tree: Tree = field(default_factory=Tree)
    shown: Tree = field(default_factory=lambda: Tree(exact=True))
    """Prompts as they were written: equal messages of two sessions may differ in their reasoning."""
    tools: Sequence[ToolSchema] = ()
    """Tools of calls whose form may not say which they had: spans without definitions of tools."""
    unread: Counter[str] = field(default_factory=Counter)
    """Members of requests and answers that are not read, by API, and in how many calls each is."""
    _kept: dict[str, Answered] = field(default_factory=dict)
    """Calls by the answer's id."""
    _items: dict[str, JSON] = field(default_factory=dict)
    """Items of answers by their id."""
    _last: dict[str, str] = field(default_factory=dict)
    """Id of the last answer of each conversation that a server keeps."""
    _followed: dict[str, str | None] = field(default_factory=dict)
    """Id of the answer before an answer of such a conversation, by its id."""
    _tools: dict[str, tuple[str, Defaults]] = field(default_factory=dict)

    def calls(self, record: Record, form: str | None = None, *, in_order: bool = False) -> list[Call]:
        """Read the call of a record: one for each of its answers.

        in_order: calls of a conversation that a server keeps come in their order. Otherwise Later is raised for them.
        Raises BadConversation, ApiError, Waits and Later.
        """
        if run_kind(record.fields) is not None:
            record, form = Record(record.where, call_of(record.fields)), RUNS
        if is_whole(record.fields):
            return self._whole(record)
        logged = logged_call(record.fields)
        conversation = id_of(logged.body.get("conversation")) if logged.api == "responses" else None
        if conversation is None or logged.follows is not None:
            return self._read(logged, record, form or logged.api)
        if not in_order:
            raise Later(conversation, time_of(record.fields, logged.response))
        answer = id_of(logged.response.get("id")) or f"without an id, {record.where}"
        logged.follows = self._followed.get(answer, self._last.get(conversation))
        calls = self._read(logged, record, form or logged.api)
        if answer not in self._followed:  # a record that stands in the log twice is one turn
            self._followed[answer] = logged.follows
            self._last[conversation] = answer
        return calls

    def _read(self, logged: Logged, record: Record, form: str) -> list[Call]:
        reading, dialect = Reading(logged.api), DIALECTS[logged.api]
        body = {name: logged.body[name] for name in PROMPT[logged.api] if logged.body.get(name) is not None}
        before = None if logged.follows is None else self._before(logged.follows)
        kept = {} if before is None else self._as_kept(before, logged)
        if logged.api == "responses":
            body["input"] = self._whole_items(body.get("input"))
            if logged.follows is not None:
                body["previous_response_id"] = logged.follows
        if logged.api == "chat":
            messages = as_list(body.get("messages"))
            body["messages"] = cast(JSON, [with_our_names(one) if isinstance(one, dict) else one for one in messages])
        check_texts(body.get("input" if logged.api == "responses" else "messages"))
        request = dialect.read(parsed(json.dumps(body).encode()), reading, kept)
        prompt = numbered([plain(message) for message in request.messages])
        instructions = prompt[:1] if logged.body.get("instructions") else []
        later = request.later if isinstance(request, Translated) else ()
        functions = [*request.functions, *cast(Sequence[ToolSchema], later)]
        if not functions and form in (SPANS, RUNS):
            functions = list(self.tools)
        text, defaults = self._declared(functions)
        place, shown, depth = ROOT, ROOT, len(prompt)
        if before is not None and logged.api == "responses":
            place, shown, prompt = self._continued(before, instructions, prompt[len(instructions) + 1 :])
            depth = len(prompt) + (before.call.depth + len(before.call.turns) if place else 0)
        place, shown = self.tree.extended(place, prompt, defaults), self.shown.extended(shown, prompt)
        begun = request.begun if isinstance(request, Translated) else ""
        calls = []
        for answer in logged.answers:
            turns = [plain(message) for message in dialect.turns(answer, reading)]
            if begun and turns:
                turns[0]["content"] = begun + str(turns[0]["content"])
            check_answer(turns)
            sent = [str(call["id"]) for call in turns[-1].get("tool_calls", ())]
            turns = numbered(turns)
            end = self.tree.extended(place, turns, defaults)
            calls.append(
                Call(
                    record.where, form, place, end, turns, text, shown,
                    ids=ids_of(record.fields, logged.response),
                    session=first_id((record.fields, logged.body), SESSIONS),
                    trace=first_id((record.fields, logged.body), TRACES),
                    model=model_of(logged.response, logged.body, record.fields),
                    time=time_of(record.fields, logged.response),
                    depth=depth,
                )
            )  # fmt: skip
        if logged.api != "chat" and calls:
            self._keep(logged, calls[0], instructions, sent)
        known = fields_of(logged.api)
        strange = [name for name, value in logged.body.items() if name not in known and value not in (None, [], {})]
        strange = strange if logged.own else []
        if logged.own and record.fields.get("tools") and not logged.body.get("tools"):
            strange.append("tools beside the request")
        self.unread.update({f"{logged.api}: {name}" for name in (*strange, *reading.dropped)})
        return calls

    def _whole(self, record: Record) -> list[Call]:
        """Read a conversation: a call for each of its answers. Raises BadConversation."""
        fields = record.fields
        check_end(fields)
        found = conversation(fields)
        check_texts(cast(JSON, found.messages))
        for told in found.messages:
            told["role"] = "system" if told.get("role") == "developer" else told.get("role")
        self.unread.update({f"{WHOLE}: {name}" for one in found.messages for name in further_fields(one)})
        messages = numbered(checked(replace(found, ends_with_calls=True), SERVED))
        weights = [cast(dict[str, JSON], message).pop("weight", None) for message in messages]
        asked = next((number for number, message in enumerate(messages) if message["role"] == "user"), len(messages))
        text, defaults = self._declared(found.tools)
        places, shown = [ROOT], [ROOT]
        for message in messages:
            places.append(self.tree.extended(places[-1], [message], defaults))
            shown.append(self.shown.extended(shown[-1], [message]))
        whole = Whole(record.where, places[-1])
        calls = [
            Call(
                record.where, WHOLE, places[number], places[number + 1], [message], text, shown[number],
                session=first_id([fields], SESSIONS) or id_of(fields.get("id")),
                trace=first_id([fields], TRACES),
                model=model_of(fields),
                time=time_of(fields),
                depth=len(messages),
                whole=whole,
            )
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and weights[number] != 0 and number > asked
        ]  # fmt: skip
        if not calls:
            raise BadConversation("a conversation without a turn to learn", "all have weight 0, or nobody asked before")
        calls[-1].ids = ids_of(fields, {})
        return calls

    def _declared(self, functions: Sequence[ToolSchema]) -> tuple[str, Defaults]:
        """Return JSON text of tools, and the defaults that they declare."""
        text = json.dumps(functions, ensure_ascii=False) if functions else ""
        if text not in self._tools:
            self._tools[text] = (text, defaults_of(functions, doubles=False))
        return self._tools[text]

    def _keep(self, logged: Logged, call: Call, instructions: list[Message], sent: list[str]) -> None:
        if isinstance(id := logged.response.get("id"), str):
            self._kept[id] = Answered(call, self.shown.extended(call.shown, call.turns), instructions, sent)
        for item in as_list(logged.answers[0]) if logged.api == "responses" else ():
            if isinstance(item, dict) and isinstance(item.get("id"), str):
                self._items[str(item["id"])] = item

    def _before(self, id: str) -> Answered:
        """Return the call that a request goes on from. Raises Waits."""
        if id not in self._kept:
            raise Waits(id)
        return self._kept[id]

    def _as_kept(self, before: Answered, logged: Logged) -> dict[str, Kept]:
        """Return what a request goes on from; of Responses the last turn alone, as their reader needs no more."""
        earlier = [] if logged.api == "responses" else self.shown.path(before.shown)[:-1]
        made = [*map(ChatMessage.model_validate, earlier), before.last()]
        tools = json.loads(before.call.tools) if before.call.tools else None
        return {str(logged.follows).removeprefix("resp_").removeprefix("msg_"): Kept(made, tools)}

    def _continued(
        self, before: Answered, instructions: list[Message], new: list[Message]
    ) -> tuple[int, int, list[Message]]:
        """Return the places of a prompt's beginning in both trees, and the messages behind it.

        The beginning is the earlier prompt and answer, so that a long chain is read in linear time; with other
        instructions it is another one.
        """
        if instructions == before.instructions:
            return before.call.end, before.shown, new
        earlier = self.shown.path(before.shown)[len(before.instructions) :]
        return ROOT, ROOT, [*instructions, *earlier, *new]

    def _whole_items(self, given: JSON) -> JSON:
        """Replace items that stand for others by these. Reasoning that only its provider can read is left out."""
        if not isinstance(given, list):
            return given
        found = list[JSON]()
        for item in given:
            if isinstance(item, dict) and item.get("type") == "item_reference":
                item = self._items.get(str(item.get("id")), item)
            if isinstance(item, dict) and item.get("type") == "reasoning":
                if not item.get("content"):
                    continue
                item = {name: value for name, value in item.items() if name != "encrypted_content"}
            found.append(item)
        return found


def logged_call(fields: Fields) -> Logged:
    """Find request and answer of a record. Raises BadConversation."""
    name, found = first_body(fields, REQUESTS)
    request: JSON = {**fields, "input": found} if isinstance(found, list) else found
    if not isinstance(request, dict) or not is_request(request):
        request = dict(fields)
    own = "messages" not in fields and not isinstance(found, list) and request != fields
    name, response = first_body(fields, RESPONSES)
    if response is None and is_response(fields):
        response = dict(fields)
    if not is_request(request):
        if "role" in fields and "content" in fields:
            raise BadConversation("a message alone", "a record has to hold all of a conversation, as `messages`")
        keys = ", ".join(sorted(map(str, fields))) or "no member"
        raise BadConversation("unknown form", f"no messages, conversations, input nor request with them, but {keys}")
    if isinstance(parameters := fields.get("model_parameters"), dict):
        request = {**parameters, **request}
    answer = as_object(opened(fields.get(name)))
    check_status(answer, fields)
    if response in (None, {}) and (why := failure(fields)) is not None:
        raise BadConversation("the answer is an error", why)
    if isinstance(response, str) and name not in WORDS and not is_stream(response):
        raise BadConversation("an answer that is no JSON", f"text of {len(response):,} characters")
    return _of_bodies(request, response, own)


STATUS = ("status_code", "statusCode", "response_status", "status")
ERRORS = ("error_str", "error_message", "statusMessage", "error")
WORDS = ("output", "outputs", "completion")
"""Members in which logs hold an answer's text alone."""


def is_whole(fields: Fields) -> bool:
    """Check for a whole conversation: ShareGPT's, or messages that end with the assistant's, without an answer."""
    if isinstance(opened(fields.get("conversations")), list):
        return True
    said = as_list(opened(fields.get("messages")))
    ended = bool(said) and as_object(said[-1]).get("role") == "assistant"
    return ended and first_body(fields, RESPONSES)[1] is None and not is_response(fields)


def check_end(fields: Fields) -> None:
    """Raise BadConversation for a whole conversation that ended with an error, or with an answer that was cut."""
    if (error := failure(fields)) is not None:
        raise BadConversation("the answer is an error", error)
    check_status(fields)
    said = as_list(opened(fields.get("messages")))
    ends = [held.get(name) for held in (*inside(fields), *map(as_object, said)) for name in ENDS]
    cut = CUT.intersection(map(str, ends))
    if cut:
        raise BadConversation("an answer that was cut by a limit", f"it ended with {', '.join(sorted(cut))}")


def check_status(*held: Fields) -> None:
    """Raise BadConversation for the HTTP status of an error in one of the objects."""
    for status in (one.get(name) for one in held for name in STATUS):
        if isinstance(status, int) and status >= 400:
            raise BadConversation("the answer is an error", f"HTTP {status}")


ENDS = ("finish_reason", "stop_reason", "finishReason", "stopReason")


def failure(fields: Fields) -> str | None:
    """Return what a record says about a call that failed."""
    found = next((fields[name] for name in ERRORS if fields.get(name) and isinstance(fields[name], str | dict)), None)
    return found if found is None or isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def further_fields(message: Mapping[str, object]) -> list[str]:
    """List the fields of a message that rows do not take."""
    known = {*(one.name for one in MESSAGE), *FLAGS, *ENDS}
    return [name for name, value in message.items() if name not in known and value not in (None, "", [], {})]


def first_body(fields: Fields, names: Iterable[str]) -> tuple[str, JSON]:
    """Return the first body under one of the names, its JSON text parsed, also where it is in `body`; and the name."""
    for name in names:
        value = opened(fields.get(name))
        if isinstance(value, dict):
            inner = next((opened(value[key]) for key in INNER if value.get(key) not in (None, "")), None)
            value = value if inner is None else inner
        if value not in (None, ""):
            return name, value
    return "", None


def is_request(body: Fields) -> bool:
    """Check for the members of a request."""
    return isinstance(opened(body.get("messages")), list) or (
        isinstance(opened(body.get("input")), str | list) and "messages" not in body
    )


def is_response(body: Fields) -> bool:
    """Check for the members of an answer."""
    return any(isinstance(body.get(name), list) for name in ("choices", "output")) or (
        body.get("type") == "message" and isinstance(body.get("content"), list)
    )


def _of_bodies(request: Fields, response: JSON, own: bool) -> Logged:
    """Tell which API it is, and take the answers. Raises BadConversation."""
    request = {
        name: opened(value) if name in ("messages", "tools", "input") else value for name, value in request.items()
    }
    if is_stream(response):
        response = assembled(response)
    if response is None:
        last = as_object(next(iter(as_list(request.get("messages"))[-1:]), None)).get("role")
        raise BadConversation("a call without an answer", f"its messages end with {last}" if last else "")
    if isinstance(response, list):
        response = _of_list(response)
    if isinstance(response, str):
        response = {"role": "assistant", "content": response}
    body = as_object(response)
    if not body:
        raise BadConversation("a call without an answer", "the answer is empty")
    error = body.get("error")
    if error or body.get("type") == "error" or body.get("status") in ("failed", "cancelled"):
        raise BadConversation("the answer is an error", json.dumps(error or body, ensure_ascii=False))
    api, answers, ends = _answers(request, body)
    if not answers:
        raise BadConversation("a call without an answer", f"its members: {', '.join(sorted(map(str, body)))}")
    if CUT.intersection(map(str, ends)):
        raise BadConversation("an answer that was cut by a limit", f"it ended with {', '.join(map(str, ends))}")
    if api != "responses" and "messages" not in request:
        request["messages"] = request["input"]
    for name in ELSEWHERE[api]:
        if request.get(name):
            raise BadConversation("a prompt that the log does not hold as messages", f"the request has {name!r}")
    follows = request.get("previous_response_id") if api == "responses" else None
    if api == "messages":
        follows = as_object(request.get("thread")).get("previous_message_id")
    return Logged(api, request, answers, body, follows if isinstance(follows, str) else None, own)


CUT = {"length", "max_tokens", "incomplete", "model_context_window_exceeded"}
"""Ends of answers that are not whole."""


def _of_list(response: list[JSON]) -> JSON:
    """Return the answer that a list of messages, blocks or items is."""
    kinds = [one.get("type") for one in response if isinstance(one, dict)]
    if response and all(isinstance(one, dict) and "role" in one and "type" not in one for one in response):
        return response[-1]
    if any(kind in ("text", "tool_use", "thinking") for kind in kinds):
        return {"type": "message", "content": response}
    return {"output": response}


def _answers(request: Fields, body: Fields) -> tuple[Api, list[JSON], list[JSON]]:
    """Return the API, each answer, and how they ended."""
    if isinstance(choices := body.get("choices"), list):
        messages = [as_object(one) for one in choices]
        return "chat", [_chat(one["message"]) for one in messages if one.get("message")], [
            one.get("finish_reason") for one in messages
        ]  # fmt: skip
    if isinstance(output := body.get("output"), list):
        items = [one for one in output if not _is_sealed(one)]
        return "responses", [[_open(one) for one in items]] if items else [], [body.get("status")]
    content = body.get("content")
    if isinstance(content, list) and (body.get("type") == "message" or "system" in request):
        return "messages", [content] if content else [], [body.get("stop_reason")]
    if "system" in request and isinstance(content, str):
        return "messages", [[{"type": "text", "text": content}]], []
    if "content" in body or "tool_calls" in body:
        asked = as_list(request.get("input"))
        if "messages" in request or (asked and all("role" in as_object(one) for one in asked)):
            return "chat", [_chat(dict(body))], [body.get("finish_reason")]
        return "responses", [[{"type": "message", "role": "assistant", "content": content}]], []
    return "chat", [], []


def _is_sealed(item: JSON) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning" and not item.get("content")


def _open(item: JSON) -> JSON:
    if isinstance(item, dict) and item.get("type") == "reasoning":
        return {name: value for name, value in item.items() if name != "encrypted_content"}
    return item


def _chat(message: JSON) -> JSON:
    """Name the members of a message as the reader does, and leave out an empty list of calls."""
    named = with_our_names(as_object(message))
    named["role"] = "assistant"
    return cast(JSON, {name: value for name, value in named.items() if value not in (None, [])})


PICTURES = ("image_url", "image", "input_image")


def check_texts(messages: JSON) -> None:
    """Raise BadConversation for an image in messages, before anything decodes it."""
    for number, message in enumerate(as_list(messages)):
        for part in as_list(as_object(message).get("content")):
            held = (part, *as_list(as_object(part).get("content")))
            if kind := next((one["type"] for one in map(as_object, held) if one.get("type") in PICTURES), None):
                raise BadConversation("an image", f"message {number} has a part {kind}; rows of logs hold text alone")


def plain(message: ChatMessage) -> Message:
    """Return a message as rows have it. Raises BadConversation for an image."""
    made = message.to_message()
    if not isinstance(made["content"], str):
        raise BadConversation("an image", "rows of conversations hold text alone")
    if made["role"] == "developer":
        made["role"] = "system"
    return made


def numbered(messages: list[Message]) -> list[Message]:
    """Number the calls of each turn from 0, and name them so in the answers: ids differ from one call to the next."""
    numbers = dict[str, str]()
    for message in messages:
        if message["role"] == "assistant":
            calls = message.get("tool_calls", [])
            numbers = {str(call["id"]): str(number) for number, call in enumerate(calls)}
            for number, call in enumerate(calls):
                call["id"] = str(number)
        elif "tool_call_id" in message:
            message["tool_call_id"] = numbers.get(message["tool_call_id"], message["tool_call_id"])
    return messages


def check_answer(turns: Sequence[Message]) -> None:
    """Raise BadConversation for an answer that says and calls nothing."""
    if not turns or not any(content_text(turn["content"]).strip() or turn.get("tool_calls") for turn in turns):
        raise BadConversation("an empty answer", "it says nothing and calls no tool")
    if any(turn["role"] != "assistant" for turn in turns):
        raise BadConversation("an answer with a turn that is not the assistant's", "")


def inside(fields: Fields) -> Iterator[Fields]:
    """Yield a record, then the members that hold further ones."""
    yield fields
    for name in ABOUT:
        value = opened(fields.get(name))
        if isinstance(value, dict):
            yield value


def id_of(value: JSON) -> str | None:
    """Return an id: text, a whole number, or an object's `id`."""
    if isinstance(value, dict):
        value = value.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).strip() or None


def first_id(records: Iterable[Fields], names: Sequence[str]) -> str | None:
    """Return the first id under one of the names, also in members that hold further ones."""
    found = (id_of(held.get(name)) for fields in records for held in inside(fields) for name in names)
    return next((id for id in found if id is not None), None)


def ids_of(fields: Fields, response: Fields) -> tuple[str, ...]:
    """List the names of a call; the id of its answer is one."""
    found = [id_of(response.get("id")), *(id_of(fields.get(name)) for name in IDS)]
    return tuple(dict.fromkeys(id for id in found if id is not None))


def model_of(*bodies: Fields) -> str | None:
    """Return the model's name, the answer's first."""
    return next((name for body in bodies if isinstance(name := body.get("model"), str) and name), None)


def time_of(*records: Fields) -> float | None:
    """Return when a call began, in seconds since 1970."""
    times = (seconds(fields.get(name)) for fields in records for name in TIMES)
    return next((time for time in times if time is not None), None)


_DIGITS = re.compile(r"[0-9]{9,20}(\.[0-9]+)?")


def seconds(value: JSON) -> float | None:
    """Read a time: an ISO text, or seconds, milli-, micro- or nanoseconds since 1970.

    None for other values, and for times before 1973 or after 5138: programs write such where they have none.
    """
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = float(value)
    if isinstance(value, str):
        try:
            told = datetime.fromisoformat(value)
        except ValueError:
            return None
        value = (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
        return value if 1e8 < value < 1e11 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e8 < value < 1e20:
        return None
    return value / next(unit for unit in (1, 1e3, 1e6, 1e9) if value < 1e11 * unit)


def records_in(record: Record) -> Iterator[Record]:
    """Yield what stands around the records that a record is a list of, and each of them with what it has from there; or
    the record.
    """
    fields = record.fields
    lists = [name for name in LISTS if _records(fields.get(name))]
    held = fields.get("conversations")  # ShareGPT's turns, or a list of conversations
    if _records(held) and all("messages" in as_object(one) for one in as_list(held)):
        lists.append("conversations")
    of_call = (*REQUESTS[:4], *RESPONSES[:3], "messages", "choices", "conversations")
    is_call = any(name in fields and name not in lists for name in of_call)
    if not lists or is_call or (lists == ["scores"] and is_request(fields)):
        yield record
        return
    around = {name: fields[name] for name in (*SESSIONS, *TRACES) if fields.get(name)}
    if "observations" in lists and (id := id_of(fields.get("id"))):
        around.setdefault("traceId", id)
    yield Around(record.where, {name: value for name, value in fields.items() if name not in lists} | around)
    around |= {name: fields[name] for name in ("model", "tools") if fields.get(name)}
    for name in lists:
        for number, held in enumerate(as_list(fields[name]), start=1):
            yield from records_in(Record(f"{record.where}, {name} {number}", {**around, **as_object(held)}))


def _records(value: JSON) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
