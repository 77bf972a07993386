"""Check of messages that come from a file: the one place that says what a row's conversation may be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from agentrl.chat.message import parse_json
from agentrl.system.json_value import JSON
from agentrl.trajectory import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("name", "tool_call_id", "reasoning_content")
"""Keys of a message that hold text where they are there."""


class Unfit(Exception):
    """Messages that cannot be used: the place in them, what was expected there and what was found."""

    def __init__(self, place: str, expected: str, found: object) -> None:
        """`place`: empty for the whole, else such as `message 2`, counted from 0."""
        self.place, self.expected, self.found = place, expected, short(found)
        super().__init__(f"{place}: expected {expected}, found {self.found}".removeprefix(": "))


def read_messages(value: object) -> list[Message]:
    """Return the messages of a row, given as a list or as that list in JSON text. Raises Unfit.

    A tool's answer behind an assistant turn without tool_calls passes: its calls may be in its text.
    """
    try:
        if isinstance(value, str):
            value = _parsed(value)
        messages = without_nulls(value)
        if not isinstance(messages, list) or not messages:
            raise Unfit("", "a list of messages", value)
        for index, message in enumerate(messages):
            _check_message(message, f"message {index}")
    except RecursionError:
        raise Unfit("", "messages that a template can write", "some that are nested too deeply") from None
    checked: list[Message] = messages
    _check_answers(checked)
    return checked


def calls_in_text(messages: Sequence[Message]) -> bool:
    """Say whether a tool answers an assistant turn that has no tool_calls."""
    pairs = itertools.pairwise(messages)
    return any(
        message["role"] == "tool" and before["role"] == "assistant" and not before.get("tool_calls")
        for before, message in pairs
    )


def without_nulls(value: object) -> object:
    """Drop the null fields of mappings: a parquet struct has every key that any row has, null where it had none."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def short(value: object) -> str:
    """Shorten a value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _parsed(text: str) -> JSON:
    try:
        return parse_json(text)
    except ValueError as error:
        raise Unfit("", f"a list of messages, or one in JSON text ({error})", text) from None


def _check_message(message: object, place: str) -> None:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise Unfit(place, "{role, content}", message)
    if role not in ROLES:
        raise Unfit(place, f"one of {', '.join(ROLES)} as role", role)
    for key in TEXTS:
        if not isinstance(message.get(key, ""), str):
            raise Unfit(place, f"text as {key}", message[key])
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise Unfit(place, "a list of {function: {name, arguments}} as tool_calls", calls)
    if calls and role != "assistant":
        raise Unfit(place, "tool_calls in messages of the assistant only", message)
    for index, call in enumerate(calls):
        _check_call(call, f"{place}, call {index}")
    _check_content(message.get("content"), bool(calls), place, message)


def _check_content(content: object, has_calls: bool, place: str, message: object) -> None:
    if isinstance(content, str) or (has_calls and content in (None, [])):
        return
    if not isinstance(content, list) or not content:
        raise Unfit(place, "text as content", message)
    for part in content:
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
        if kind == "image":
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Unfit(place, "text, or a list of parts {type: text, text} and {type: image}, as content", part)


def _check_call(call: object, place: str) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not function.get("name"):
        raise Unfit(place, "{function: {name, arguments}}", call)
    for key, value in (("name", function["name"]), ("id", call.get("id", ""))):
        if not isinstance(value, str):
            raise Unfit(place, f"text as {key}", value)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError:
            return  # a broken call, to be learnt from: templates write its text as it is
    if not isinstance(arguments, dict):
        raise Unfit(place, "a JSON object as arguments", arguments)


def _check_answers(messages: Sequence[Message]) -> None:
    """Check that each tool answer stands behind an assistant turn, and answers a call of it that no other answers."""
    asked: list[str | None] | None = None
    in_text = False
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = [call.get("id") for call in message.get("tool_calls", ())]
            in_text = not asked
        elif message["role"] != "tool":
            asked = None
        elif asked is None:
            raise Unfit(f"message {index}", "a tool's answer only behind an assistant turn", message)
        elif not in_text:
            id = message.get("tool_call_id")
            if id is None or not any(asked):
                id = asked[0] if asked else id  # in the order of the calls
            if id not in asked:
                raise Unfit(f"message {index}", "the answer to a call of the assistant turn before", message)
            asked.remove(id)


def has_images(messages: Sequence[Message]) -> bool:
    """Say whether a message has a part that is an image."""
    contents = (message.get("content") for message in messages)
    return any(part.get("type") == "image" for content in contents if isinstance(content, list) for part in content)
