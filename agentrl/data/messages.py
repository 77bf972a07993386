"""Check of messages from a file: the one place that defines a row's conversation."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from typing import cast

from agentrl.chat.message import content_text, parse_json
from agentrl.data.bad_rows import BadRow
from agentrl.errors import UserError
from agentrl.system.json_value import JSON
from agentrl.trajectory import Message, ToolCall
from agentrl.trajectory.picture import Picture

ROLES = ("system", "developer", "user", "assistant", "tool")
OLD_ROLES = {"function": "tool"}
"""Roles by their earlier names."""
CALLS = ("tool_calls", "function_call")
"""Keys of a message that hold calls; the second is the earlier one."""
TEXTS = ("name", "tool_call_id", "reasoning_content")
"""Keys of a message that hold text where they are there."""
OTHER_REASONING = ("reasoning", "thinking")
"""Names that servers give to reasoning_content."""
FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_scale", "loss_mask", "step_loss_mask")
"""Fields that say whether a message is learnt: weight is OpenAI's, train and training are axolotl's, loss is ms-swift's
and XTuner's, loss_scale ms-swift's, trainable Tinker's, step_loss_mask slime's."""
PARTLY = ("train_detail", "training_detail")
"""Fields that say which parts of a message are learnt; axolotl's."""
READ = {
    "tool": {"role", "content", "name", "tool_call_id"},
    "assistant": {"role", "content", "tool_calls", "reasoning_content"},
}
"""Fields that are read of a message, by its role."""
READ_BY_ALL = {"role", "content"}
KNOWN = READ_BY_ALL.union(*READ.values())
IN_CALLS, IN_FUNCTIONS, IN_PARTS = {"id", "type", "function"}, {"name", "arguments"}, {"type", "text", "image"}
EMPTY: tuple[object, ...] = (None, "", [], {})


class Unfit(BadRow):
    """A value of a row that cannot be used: the place in it, the expected and the found value."""

    def __init__(self, place: str, expected: str, found: object) -> None:
        """`place`: empty for the whole, else e.g. `message 2`, counted from 0."""
        self.expected, self.found = expected, short(found)
        super().__init__(place, f"expected {expected}, found {self.found}")


def read_messages(value: object) -> list[Message]:
    """Return the messages of a row, given as a list or as that list in JSON text. Raises Unfit.

    Other names become ours: `function_call`, `reasoning`, `thinking`, the role `function`, and calls without `function`
    around name and arguments. Further fields stay, for a template that reads them. A tool's answer after an assistant
    turn without tool_calls passes: its calls may be in its text.
    """
    try:
        if isinstance(value, str):
            value = _parsed(value)
        if not isinstance(value, list) or not value:
            raise Unfit("", "a list of messages", value)
        messages = [_read_message(message, f"message {index}") for index, message in enumerate(value)]
    except RecursionError:
        raise Unfit("", "messages that a template can write", "some that are nested too deeply") from None
    _check_answers(messages)
    return messages


def message_list(value: object, place: str) -> list[dict[str, object]]:
    """Read a list of mappings, which may be JSON text, of the column that `place` names. Raises Unfit."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise Unfit(place, f"a list of messages, or one in JSON text ({error})", value) from None
    found = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    if not isinstance(value, list) or not value or len(found) < len(value):
        raise Unfit(place, "a list of messages", value)
    return found


def with_one_flag(messages: Sequence[Message]) -> list[Message]:
    """Replace the fields that say whether a message is learnt by one: `weight`, 0 where any of them says not.

    A message that is not the assistant's is never learnt; a 1 stays there, so that the user is warned. Raises Unfit for
    a flag other than 0, 1, false and true, and for a flag of a part of an assistant's message.
    """
    found = []
    for index, message in enumerate(messages):
        if partly := _partly(message):
            expected = f"a turn that is learnt or not, as a whole (without {partly})"
            raise Unfit(f"message {index}", expected, message)
        flags = {name: value for name, value in message.items() if name in FLAGS and value is not None}
        for name, value in flags.items():
            if not isinstance(value, int | float) or value not in (0, 1):
                expected = f"0 or 1, false or true, as {name}: a turn is learnt or not, with no weight between"
                raise Unfit(f"message {index}", expected, value)
        if flags:
            message = cast(Message, {name: value for name, value in message.items() if name not in FLAGS})
            if all(flags.values()) != (message["role"] == "assistant"):
                message["weight"] = int(all(flags.values()))
        found.append(message)
    return found


def _partly(message: Message) -> str | None:
    """Find a field that says that a part of an assistant's message is not learnt."""
    if message["role"] != "assistant":
        return None
    content = message.get("content")
    parts: list[Mapping[str, object]] = [part for part in content or () if isinstance(part, dict)]
    inside = (name for part in parts for name in FLAGS if part.get(name) is not None)
    return next(inside, None) or next((name for name in PARTLY if message.get(name) not in EMPTY), None)


def without_flag(messages: Sequence[Message]) -> list[Message]:
    """Take off the fields that say whether a message is learnt."""
    return [cast(Message, {name: value for name, value in one.items() if name not in FLAGS}) for one in messages]


def told_fields(unread: Mapping[str, int]) -> dict[str, int]:
    """Write the warning about fields that are not read, from their counts."""
    return {
        f"messages with the field {name}, which neither agentrl nor the chat template reads": count
        for name, count in unread.items()
    }


class FurtherFields:
    """Fields of messages that are not read here: in how many conversations each is, and the first of them."""

    def __init__(self, further: Callable[[Message], Iterable[str]] | None = None) -> None:
        """`further`: names the fields of a message; by default `further_fields`."""
        self._further = further or further_fields
        self.counts: Counter[str] = Counter()
        self._first: dict[str, list[Message]] = {}

    def note(self, messages: list[Message]) -> None:
        """Count the fields of a conversation."""
        for name in dict.fromkeys(itertools.chain.from_iterable(map(self._further, messages))):
            self.counts[name] += 1
            self._first.setdefault(name, messages)

    def unread(self, render: Callable[[list[Message]], object]) -> dict[str, int]:
        """Return the number of conversations with each field that `render` does not write either.

        A field counts as written if the first conversation with it is written otherwise without it.
        """
        return {name: count for name, count in self.counts.items() if not self._writes(render, name)}

    def _writes(self, render: Callable[[list[Message]], object], name: str) -> bool:
        whole = [cast(Message, {**one, "content": content_text(one.get("content"))}) for one in self._first[name]]
        without = [
            cast(Message, {key: value for key, value in one.items() if key != name or key not in self._further(one)})
            for one in whole
        ]
        try:
            return whole != without and render(whole) != render(without)
        except (UserError, ValueError, TypeError, LookupError, RecursionError):
            return False


def further_fields(message: Message) -> Iterator[str]:
    """Yield the filled fields of a message that are not read here, also as `tool_calls.NAME` and `content.NAME`."""
    yield from _further(message, READ.get(message["role"], READ_BY_ALL), "")
    for call in message.get("tool_calls") or ():
        yield from _further(call, IN_CALLS, "tool_calls.")
        yield from _further(call.get("function", {}), IN_FUNCTIONS, "tool_calls.function.")
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        yield from _further(part, IN_PARTS, "content.")


def further_with_reasoning(message: Message) -> Iterator[str]:
    """Yield the fields of `further_fields`, and reasoning_content, which templates may leave out."""
    yield from further_fields(message)
    if message["role"] == "assistant" and message.get("reasoning_content"):
        yield "reasoning_content"


def _further(fields: Mapping[str, object], read: Set[str], prefix: str) -> Iterator[str]:
    return (f"{prefix}{name}" for name, value in fields.items() if name not in read and value not in EMPTY)


def calls_in_text(messages: Sequence[Message]) -> bool:
    """Check whether a tool answers an assistant turn that has no tool_calls."""
    pairs = itertools.pairwise(messages)
    return any(
        message["role"] == "tool" and before["role"] == "assistant" and not before.get("tool_calls")
        for before, message in pairs
    )


def with_wrapped_tools(tools: JSON) -> JSON:
    """Wrap functions that stand for themselves in a list of tools, as OpenAI's schemas are wrapped."""
    if not isinstance(tools, list):
        return tools
    bare = [isinstance(tool, dict) and "function" not in tool and "name" in tool for tool in tools]
    return [{"type": "function", "function": tool} if own else tool for tool, own in zip(tools, bare, strict=True)]


def without_nulls(value: object) -> object:
    """Drop the null fields of mappings: a parquet struct has every key that any row has, null in rows without it."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def short(value: object) -> str:
    """Shorten a value for a message."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _parsed(text: str) -> JSON:
    try:
        return parse_json(text)
    except ValueError as error:
        expected = 'a list of messages, e.g. [{"role": "user", "content": "..."}], or one in JSON text'
        raise Unfit("", f"{expected} ({error})", text) from None


def _read_message(message: object, place: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unfit(place, "{role, content}", message)
    read = _own_fields(message)
    if read["role"] not in ROLES:
        raise Unfit(place, f"one of {', '.join(ROLES)} as role", read["role"])
    for key in TEXTS:
        if not isinstance(read.get(key, ""), str):
            raise Unfit(place, f"text as {key}", read[key])
    calls = read.get("tool_calls", [])
    if not isinstance(calls, list):
        raise Unfit(place, "a list of {function: {name, arguments}} as tool_calls", calls)
    if calls and read["role"] != "assistant":
        raise Unfit(place, "tool_calls in messages of the assistant only", message)
    if "tool_calls" in read:
        read["tool_calls"] = [_read_call(call, f"{place}, call {index}") for index, call in enumerate(calls)]
    _check_content(read.get("content"), bool(calls), place, message)
    return cast(Message, read)


def _own_fields(message: Mapping[str, object]) -> dict[str, object]:
    """Fields of a message by our names, without nulls and without further fields that are empty."""
    read = {key: value if key in CALLS else without_nulls(value) for key, value in message.items()}
    read = with_our_names({key: value for key, value in read.items() if value not in EMPTY or key in KNOWN})
    return {key: value for key, value in read.items() if value is not None}


def with_our_names(message: Mapping[str, object]) -> dict[str, object]:
    """Rename the role and the fields of a message that have other names, where that loses nothing; others stay."""
    named = dict(message)
    role = named.get("role")
    named["role"] = OLD_ROLES.get(role, role) if isinstance(role, str) else role
    for name in OTHER_REASONING:
        value, known = named.get(name), named.get("reasoning_content")
        if value in EMPTY or value == known:
            named.pop(name, None)
        elif isinstance(value, str) and not known:
            named["reasoning_content"] = named.pop(name)
    call, calls = named.get("function_call"), named.get("tool_calls") or []
    known_calls = [one.get("function") for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
    if call in EMPTY or call in known_calls:
        named.pop("function_call", None)
    elif not calls:
        named["tool_calls"] = [{"type": "function", "function": named.pop("function_call")}]
    return named


def _check_content(content: object, has_calls: bool, place: str, message: object) -> None:
    if isinstance(content, str) or (has_calls and content in (None, [])):
        return
    if not isinstance(content, list) or not content:
        raise Unfit(place, "text as content", message)
    for part in content:
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
        if kind == "image":
            continue
        if kind == "image_url":
            raise Unfit(
                place, "{type: image} where an image stands, and images in a column (data.image_key; RL only)", part
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            parts = "text, or a list of parts {type: text, text} and {type: image}, as content"
            raise Unfit(place, f"{parts}, not a part of type {kind!r}", part)


def _read_call(call: object, place: str) -> ToolCall:
    given = {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else {}
    function = given.get("function") or given
    if not isinstance(function, dict) or not function.get("name"):
        raise Unfit(place, "{function: {name, arguments}}", call)
    if function is given:
        given = {"type": "function", **{key: value for key, value in given.items() if key not in IN_FUNCTIONS}}
        function = {key: value for key, value in function.items() if key in IN_FUNCTIONS}
    read = {**given, "function": {key: value for key, value in function.items() if value is not None}}
    for key, value in (("name", function["name"]), ("id", read.get("id", ""))):
        if not isinstance(value, str):
            raise Unfit(place, f"text as {key}", value)
    _check_arguments(read["function"].get("arguments", {}), place)
    return cast(ToolCall, read)


def _check_arguments(arguments: object, place: str) -> None:
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError:
            return  # a broken call, to be learnt from: templates write its text as it is
    if not isinstance(arguments, dict):
        raise Unfit(place, "a JSON object as arguments", arguments)


def _check_answers(messages: Sequence[Message]) -> None:
    """Check that each tool answer follows an assistant turn, and answers a call of it that no other answers."""
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
    """Check whether a message has a part that is an image."""
    contents = (message.get("content") for message in messages)
    return any(part.get("type") == "image" for content in contents if isinstance(content, list) for part in content)


def digest_of(prompt: Sequence[Message]) -> int:
    """Hash the messages of a row's prompt, images included, to 63 bits."""

    def as_text(value: object) -> str:
        return value.digest.hex() if isinstance(value, Picture) else str(value)

    text = json.dumps(prompt, default=as_text, sort_keys=True).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
