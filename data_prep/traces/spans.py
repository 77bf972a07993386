"""Spans of OpenTelemetry's conventions for generative AI, written as calls of an API.

Read are OTLP's JSON (the file exporter's, the collector's), and what the SDK's console exporters write. Messages are in
the attributes `gen_ai.input.messages`, `gen_ai.output.messages`, `gen_ai.system_instructions` and
`gen_ai.tool.definitions`, or in events: `gen_ai.client.inference.operation.details`, and up to version 1.36
`gen_ai.user.message` and its like. Events may be records of a log, in other files than their span.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from agentrl.data.messages import with_wrapped_tools
from agentrl.system.json_value import JSON, as_list, as_object
from data_prep.conversation_formats import BadConversation, chat_call
from data_prep.records import Record

INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
CONTENT = (INPUT, OUTPUT, SYSTEM, TOOLS)
OPERATION, EVALUATION = "gen_ai.operation.name", "gen_ai.evaluation.result"
CALLS = ("chat", "generate_content", "text_completion")
"""Operations that are calls of a model."""
OLD = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
LOG_TIMES = ("timeUnixNano", "time_unix_nano", "timestamp", "observedTimeUnixNano", "observed_timestamp")
CHOICE = "gen_ai.choice"
DETAILS = "gen_ai.client.inference.operation.details"
CAPTURE = "have the program run with OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


@dataclass(slots=True)
class Event:
    """An event of a span, or a record of a log that names its span."""

    name: str
    attributes: dict[str, JSON]
    body: JSON = None
    where: str = ""
    trace: str = ""
    time: JSON = None

    def content(self) -> dict[str, JSON]:
        """Return the messages and tools in it."""
        held = {**self.attributes, **as_object(self.body)}
        return {name: held[name] for name in CONTENT if name in held}

    def sides(self) -> tuple[bool, bool]:
        """Say whether it has messages of the prompt, and whether it has an answer."""
        if self.name in OLD or self.name == CHOICE:
            return self.name in OLD, self.name == CHOICE
        held = self.content()
        if self.name == DETAILS and (not held or "error.type" in self.attributes):
            return BOTH
        return INPUT in held, OUTPUT in held


@dataclass(slots=True)
class Span:
    """One span."""

    where: str
    id: str
    trace: str
    time: JSON
    attributes: dict[str, JSON]
    events: list[Event]
    is_error: bool


@dataclass(slots=True)
class Spans:
    """Spans of a log, kept until all events are read."""

    spans: list[Span] = field(default_factory=list)
    events: dict[tuple[str, str], list[Event]] = field(default_factory=dict)
    """Events of logs by their span's id, or where they have none, by "" and their trace's id."""

    def add(self, record: Record) -> bool:
        """Take a record of spans or of their events; False where it is neither."""
        fields = record.fields
        for resource in _listed(fields, "resourceSpans", "resource_spans"):
            for scope in _listed(resource, "scopeSpans", "scope_spans", "instrumentationLibrarySpans"):
                self.spans += [_of_otlp(record.where, one) for one in _listed(scope, "spans")]
        for resource in _listed(fields, "resourceLogs", "resource_logs"):
            for scope in _listed(resource, "scopeLogs", "scope_logs"):
                for one in _listed(scope, "logRecords", "log_records"):
                    self._log(
                        record.where,
                        {**one, "attributes": _attributes(one.get("attributes")), "body": _value(one.get("body"))},
                    )
        if {"resourceSpans", "resource_spans", "resourceLogs", "resource_logs"} & fields.keys():
            return True
        if "context" in fields and "attributes" in fields and "start_time" in fields:
            self.spans.append(_of_console(record.where, fields))
            return True
        if "span_id" in fields and "attributes" in fields and "body" in fields:
            self._log(record.where, fields)
            return True
        return False

    def _log(self, where: str, one: Mapping[str, JSON]) -> None:
        attributes = as_object(one.get("attributes"))
        name = one.get("eventName") or one.get("event_name") or attributes.get("event.name")
        span = _hex(one.get("spanId") or one.get("span_id"))
        time = next((one[key] for key in LOG_TIMES if one.get(key) not in (None, "0", 0)), None)
        trace = _hex(one.get("traceId") or one.get("trace_id"))
        event = Event(str(name or ""), attributes, one.get("body"), where, trace, time)
        self.events.setdefault((span, "" if span else trace), []).append(event)

    def records(self) -> Iterator[tuple[Record, BadConversation | None]]:
        """Yield each call, and each evaluation, as a record, or why a span is none."""
        for span in self.spans:
            span.events += self.events.pop((span.id, ""), ()) if span.id else ()
            yield from _evaluations(span)
            yield from map(_read, _calls(span))
        for (id, _), events in self.events.items():
            first = next((event for event in events if event.name != EVALUATION), None)
            told = first or events[0]
            span = Span(told.where, id, told.trace, None, {OPERATION: "chat"}, events, False)
            yield from _evaluations(span)
            if first is not None:
                yield from map(_read, _calls(span))


BOTH, NEITHER = (True, True), (False, False)


def _calls(span: Span) -> Iterator[Span]:
    """Yield a span for each call that its events are. The first call has the messages of the span itself, too.

    Events of one call are its messages and then its answers, or the other way round, or one event that has all.
    """
    groups, seen, last = [list[Event]()], NEITHER, NEITHER
    for event in span.events:
        sides = event.sides()
        if event.name == EVALUATION or (sides == NEITHER and not event.content()):
            continue
        if (sides == BOTH and seen != NEITHER) or (seen == BOTH and sides not in (NEITHER, last)):
            groups.append([])
            seen = NEITHER
        groups[-1].append(event)
        seen, last = (seen[0] or sides[0], seen[1] or sides[1]), sides
    for number, events in enumerate(groups):
        made = replace(span, attributes=dict(span.attributes), events=events)
        if number:
            made.where, made.time = events[0].where or span.where, events[0].time
            made.attributes = {name: value for name, value in span.attributes.items() if name not in CONTENT}
        for event in events:
            made.time = made.time or event.time
            made.attributes |= event.attributes | event.content()
        yield made


_HEX = re.compile(r"[0-9a-fA-F]+")
_ZEROS = re.compile(r"0+|A+=+")


def _listed(fields: Mapping[str, JSON], *names: str) -> list[dict[str, JSON]]:
    return [one for name in names for one in as_list(fields.get(name)) if isinstance(one, dict)]


def _hex(id: JSON) -> str:
    """Write an id; "" where it is one of zeros, by which OpenTelemetry says that there is none."""
    text = str(id or "").removeprefix("0x")
    if _ZEROS.fullmatch(text):
        return ""
    return text.lower() if _HEX.fullmatch(text) else text  # protobuf's own JSON has base64


def _of_otlp(where: str, one: Mapping[str, JSON]) -> Span:
    events = [Event(str(event.get("name")), _attributes(event.get("attributes"))) for event in _listed(one, "events")]
    return Span(
        where,
        _hex(one.get("spanId") or one.get("span_id")),
        _hex(one.get("traceId") or one.get("trace_id")),
        one.get("startTimeUnixNano") or one.get("start_time_unix_nano"),
        _attributes(one.get("attributes")),
        events,
        as_object(one.get("status")).get("code") in (2, "STATUS_CODE_ERROR"),
    )


def _of_console(where: str, fields: Mapping[str, JSON]) -> Span:
    context = as_object(fields.get("context"))
    events = [Event(str(one.get("name")), as_object(one.get("attributes"))) for one in _listed(fields, "events")]
    return Span(
        where,
        _hex(context.get("span_id")),
        _hex(context.get("trace_id")),
        fields.get("start_time"),
        as_object(fields.get("attributes")),
        events,
        as_object(fields.get("status")).get("status_code") == "ERROR",
    )


def _attributes(listed: JSON) -> dict[str, JSON]:
    if isinstance(listed, dict):
        return listed
    found = (one for one in as_list(listed) if isinstance(one, dict))
    return {str(one.get("key")): _value(one.get("value")) for one in found}


def _value(value: JSON) -> JSON:
    """Read a value as OTLP writes it: {"stringValue": ...} and its like."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    (kind, held), *_ = value.items()
    name = kind.replace("_", "").lower()
    if name == "arrayvalue":
        return [_value(one) for one in as_list(as_object(held).get("values"))]
    if name == "kvlistvalue":
        return _attributes(as_object(held).get("values"))
    if name == "intvalue" and isinstance(held, str):
        return int(held) if held.lstrip("-").isdecimal() else held
    return held if name in ("stringvalue", "intvalue", "doublevalue", "boolvalue", "bytesvalue") else value


def _evaluations(span: Span) -> Iterator[tuple[Record, None]]:
    for event in span.events:
        if event.name == EVALUATION:
            yield _evaluation(event.where or span.where, span.id, event.trace or span.trace, event), None


def _evaluation(where: str, span: str, trace: str, event: Event) -> Record:
    about = {name.removeprefix("gen_ai.evaluation."): value for name, value in event.attributes.items()}
    value = about.get("score.value")
    vote: dict[str, JSON] = {"value": about.get("score.label") if value is None else value, "name": about.get("name")}
    response = event.attributes.get("gen_ai.response.id")
    vote |= {"comment": about.get("explanation"), "response_id": response or span or None, "trace": trace or None}
    return Record(where, vote)


def _read(span: Span) -> tuple[Record, BadConversation | None]:
    try:
        return Record(span.where, _call(span)), None
    except BadConversation as error:
        return Record(span.where, {}), error
    except (ValueError, RecursionError) as error:
        return Record(span.where, {}), BadConversation("an event that is no JSON", type(error).__name__)


def _call(span: Span) -> dict[str, JSON]:
    """Write a span as a call of Chat Completions. Raises BadConversation."""
    held = span.attributes
    is_answered = OUTPUT in held or any(event.name == CHOICE for event in span.events)
    operation = str(held.get(OPERATION) or ("chat" if is_answered else ""))
    if operation not in CALLS:
        raise BadConversation("no call of a model", f"a span {operation or 'of another kind'}")
    if INPUT in held or OUTPUT in held:
        messages = [*_system(held.get(SYSTEM)), *_messages(held.get(INPUT), INPUT)]
        choices: list[JSON] = [
            {"message": message, "finish_reason": _end(one)}
            for one in _parsed(held.get(OUTPUT), OUTPUT)
            for message in _message(as_object(one), OUTPUT, Numbered())
        ]
    else:
        messages, choices = _of_events(span.events)
    if not choices and (span.is_error or held.get("error.type")):
        raise BadConversation("the answer is an error", str(held.get("error.type") or "the span's status"))
    if not messages:
        raise BadConversation("a span without its messages", CAPTURE)
    tools = _parsed(held.get(TOOLS), TOOLS)
    return {
        "request": {"messages": messages, "tools": with_wrapped_tools([_bare(one) for one in tools]) or None},
        "response": {
            "choices": choices,
            "id": held.get("gen_ai.response.id"),
            "model": held.get("gen_ai.response.model") or held.get("gen_ai.request.model"),
        },
        "id": span.id,
        "trace": span.trace or None,
        "session": held.get("gen_ai.conversation.id") or held.get("session.id"),
        "time": span.time,
    }


def _end(one: JSON) -> JSON:
    end = as_object(one).get("finish_reason")
    return end if isinstance(end, str) else None


def _bare(tool: JSON) -> JSON:
    """Take the function out of a definition, so that all are wrapped alike."""
    found = as_object(as_object(tool).get("function")) or as_object(tool)
    return {name: found[name] for name in ("name", "description", "parameters") if found.get(name) is not None}


def _parsed(value: JSON, name: str) -> list[JSON]:
    """Return a list that an attribute holds, as JSON text or structured. Raises BadConversation."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            what = "an attribute that is cut, or no JSON"
            raise BadConversation(
                what, f"{name} ({type(error).__name__}); OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT cuts"
            ) from None
    if value is not None and not isinstance(value, list):
        raise BadConversation("an attribute that is no list", name)
    return [_value(one) for one in value or ()]


@dataclass(slots=True)
class Numbered:
    """Ids of calls and answers that have none, in their order."""

    calls: int = 0
    answers: int = 0

    def call(self, id: JSON) -> str:
        """Return the id of the next call."""
        self.calls += 1
        return str(id) if id else f"unnamed_{self.calls}"

    def answer(self, id: JSON) -> str:
        """Return the id of the call that the next answer is to."""
        self.answers += 1
        return str(id) if id else f"unnamed_{self.answers}"


def _system(value: JSON) -> list[JSON]:
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        return [{"role": "system", "content": value}]
    texts = [str(as_object(one).get("content") or "") for one in _parsed(value, SYSTEM)]
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def _messages(value: JSON, name: str) -> list[JSON]:
    numbered = Numbered()
    return [made for one in _parsed(value, name) for made in _message(as_object(one), name, numbered)]


def _message(one: dict[str, JSON], name: str, numbered: Numbered) -> list[JSON]:
    """Translate a message of parts: answers of tools become messages of their own. Raises BadConversation."""
    if not isinstance(one.get("parts"), list):
        return [one]  # OpenAI's own form, which some programs write
    text, thought, calls, answers = "", "", list[JSON](), list[JSON]()
    for part in map(as_object, as_list(one["parts"])):
        kind, content = part.get("type"), part.get("content")
        if kind == "text":
            text += str(content or "")
        elif kind == "reasoning":
            thought += str(content or "")
        elif kind == "tool_call":
            calls.append(chat_call(numbered.call(part.get("id")), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            shown = part.get("response", part.get("result"))
            shown = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
            answers.append({"role": "tool", "content": shown, "tool_call_id": numbered.answer(part.get("id"))})
        else:
            raise BadConversation("a part of a message that is no text", f"{name}: the type {kind!r}")
    message: dict[str, JSON] = {"role": one.get("role"), "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return [*answers, message] if text or thought or calls or not answers else answers


def _of_events(events: list[Event]) -> tuple[list[JSON], list[JSON]]:
    """Read the messages of events up to version 1.36: one event each, the last ones choices."""
    messages, choices = list[JSON](), list[JSON]()
    for event in events:
        held: dict[str, JSON] = {**event.attributes, **(event.body if isinstance(event.body, dict) else {})}
        if event.name in OLD:
            messages.append(_old(held, OLD[event.name]))
        elif event.name == CHOICE:
            message = held.get("message")
            message = json.loads(message) if isinstance(message, str) and message[:1] == "{" else message
            found = _old(as_object(message) or held, "assistant")
            choices.append({"message": found, "finish_reason": held.get("finish_reason")})
    return messages, choices


def _old(held: Mapping[str, JSON], role: str) -> JSON:
    calls = held.get("tool_calls")
    content = held.get("content")
    if isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    made: dict[str, JSON] = {"role": role, "content": content}
    if role == "tool":
        made["tool_call_id"] = held.get("id")
    if calls:
        made["tool_calls"] = json.loads(calls) if isinstance(calls, str) else calls
    return made
