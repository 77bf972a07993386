"""Events of a stream, put together to the answer that they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from agentrl.openai_api.messages import input_of
from agentrl.system.json_value import JSON, as_list, as_object
from data_prep.conversation_formats import BadConversation

Fields = Mapping[str, JSON]
_LINES = re.compile(r"\r\n|\n|\r")
"""Ends of lines of server-sent events; texts in JSON may hold the others that `splitlines` knows, e.g. U+2028."""


def is_stream(response: JSON) -> bool:
    """Check for server-sent events in text, or a list of events."""
    if isinstance(response, str):
        return response.lstrip().startswith(("data:", "event:"))
    first = response[0] if isinstance(response, list) and response else None
    if isinstance(first, str):
        return first.lstrip().startswith(("data:", "event:", "{"))
    kind = str(as_object(first).get("type") or as_object(first).get("object") or "")
    return kind.startswith(("response.", "message_start", "content_block", "ping")) or kind == "chat.completion.chunk"


def assembled(response: JSON) -> JSON:
    """Put the events together. Raises BadConversation where the stream did not come to its end."""
    events = list(_events(response))
    first = str(events[0].get("type", "")) if events else ""
    if first.startswith("response."):
        return _of_responses(events)
    made = _of_messages(events) if first.startswith(("message", "content_block", "ping")) else _of_chat(events)
    if made is None:
        raise BadConversation("a stream that was cut", f"{len(events)} events, and no end")
    return made


def _events(response: JSON) -> Iterator[dict[str, JSON]]:
    if isinstance(response, str):
        response = [line for line in _LINES.split(response) if line.startswith("data:")]
    for event in as_list(response):
        if isinstance(event, str):
            for line in _LINES.split(event):
                text = line.removeprefix("data:").strip()
                if text in ("", "[DONE]") or line.startswith(("event:", ":", "id:")):
                    continue
                try:
                    event = json.loads(text)
                except (ValueError, RecursionError):
                    raise BadConversation("a stream that was cut", "an event that is no JSON") from None
                yield as_object(event)
        elif isinstance(event, dict):
            yield event


def _of_responses(events: list[dict[str, JSON]]) -> JSON:
    last = next((one for one in reversed(events) if isinstance(one.get("response"), dict)), {})
    if last.get("type") not in ("response.completed", "response.incomplete", "response.failed"):
        raise BadConversation("a stream that was cut", f"{len(events)} events, and no end")
    return last["response"]


def _of_messages(events: list[dict[str, JSON]]) -> JSON:
    message: dict[str, JSON] = {"type": "message", "role": "assistant"}
    blocks = dict[int, dict[str, JSON]]()
    arguments = dict[int, str]()
    ended = False
    for event in events:
        index = event.get("index")
        delta, kind = as_object(event.get("delta")), event.get("type")
        if kind == "error":
            return {"type": "error", "error": event.get("error")}
        if kind == "message_start":
            message.update(as_object(event.get("message")))
        elif kind == "message_delta":
            message.update(delta)
        elif kind == "content_block_start" and isinstance(index, int):
            blocks[index] = dict(as_object(event.get("content_block")))
        elif kind == "content_block_delta" and isinstance(index, int) and index in blocks:
            for name in ("text", "thinking", "signature"):
                if isinstance(delta.get(name), str):
                    blocks[index][name] = str(blocks[index].get(name) or "") + str(delta[name])
            if isinstance(delta.get("partial_json"), str):
                arguments[index] = arguments.get(index, "") + str(delta["partial_json"])
        ended = ended or kind == "message_stop"
    for index, text in arguments.items():
        blocks[index]["input"] = input_of(text) if text.strip() else {}
    message["content"] = [blocks[index] for index in sorted(blocks)]
    return message if ended else None


def _of_chat(events: list[dict[str, JSON]]) -> JSON:
    head: dict[str, JSON] = {}
    messages = dict[int, dict[str, JSON]]()
    calls = dict[tuple[int, int], list[dict[str, str]]]()
    ends = dict[int, JSON]()
    for event in events:
        if event.get("error"):
            return {"error": event["error"]}
        head.update({name: event[name] for name in ("id", "model", "created") if event.get(name)})
        for choice in map(as_object, as_list(event.get("choices"))):
            place = choice.get("index")
            number = place if isinstance(place, int) else 0
            message = messages.setdefault(number, {"role": "assistant"})
            delta = as_object(choice.get("delta"))
            for name in ("content", "reasoning_content", "reasoning", "refusal"):
                if isinstance(delta.get(name), str):
                    message[name] = str(message.get(name) or "") + str(delta[name])
            for call in map(as_object, as_list(delta.get("tool_calls"))):
                at = call.get("index") or 0
                begun = calls.setdefault((number, at if isinstance(at, int) else 0), [])
                function = as_object(call.get("function"))
                id, name = str(call.get("id") or ""), str(function.get("name") or "")
                if not begun or _is_next(begun[-1], id, name):
                    begun.append({"id": id, "name": name, "text": ""})
                made = begun[-1]
                made["id"], made["name"] = made["id"] or id, made["name"] or name
                made["text"] += str(function.get("arguments") or "")
            if choice.get("finish_reason"):
                ends[number] = choice["finish_reason"]
    for number, made in ((place[0], made) for place, begun in sorted(calls.items()) for made in begun):
        function = {"name": made["name"], "arguments": made["text"]}
        listed = messages[number].setdefault("tool_calls", [])
        as_list(listed).append({"id": made["id"], "type": "function", "function": function})
    if not messages or len(ends) < len(messages):
        return None
    choices = [{"index": n, "message": messages[n], "finish_reason": ends[n]} for n in sorted(messages)]
    return {**head, "object": "chat.completion", "choices": choices}


def _is_next(made: Mapping[str, str], id: str, name: str) -> bool:
    """Say whether a part of a call begins the next one: servers exist that give all calls of an answer one index.

    A new id alone does not: others give each part of a call an id of its own.
    """
    return bool(made["name"] and name and id) and id != made["id"]
