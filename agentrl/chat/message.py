"""Parsed assistant turns, and messages in the one form that formats render."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from agentrl.system.json_value import JSON
from agentrl.trajectory import Content, FunctionCall, Message, Part, ToolCall


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call as the policy wrote it, well-formed or not."""

    id: str
    """The policy's id where its format has one, else `call00000`, `call00001`, ... in the order of the message.
    The strictest chat template asks for nine letters and digits."""
    name: str
    """Empty when no name could be read."""
    arguments: dict[str, JSON] | None
    """None exactly when `error` is set."""
    raw: str
    """The call's text without its markers."""
    error: str | None = None
    """Why the call is malformed, in words that the policy can act on."""


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """One parsed assistant turn. `text` is the text outside reasoning and calls."""

    text: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()

    def to_message(self) -> Message:
        """Convert to the OpenAI form. A malformed call carries its raw text as `arguments`."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.raw if call.arguments is None else call.arguments,
                    },
                }
                for call in self.calls
            ]
        return message


def make_call(
    index: int, raw: str, name: JSON, arguments: JSON, error: str | None, id: str | None = None
) -> ParsedCall:
    """Make a ParsedCall of a parser's findings. `arguments` may be a JSON text; None stands for no arguments."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError as fault:
            error = error or f"the arguments are not valid JSON: {fault}"
    if error is None and not (isinstance(name, str) and name):
        error = "the call has no function name"
    if error is None and arguments is not None and not isinstance(arguments, dict):
        error = f"the arguments must be a JSON object, not {type(arguments).__name__}"
    found = arguments if isinstance(arguments, dict) else {}
    return ParsedCall(
        id=id or f"call{index:05d}",
        name=name if isinstance(name, str) else "",
        arguments=None if error is not None else found,
        raw=raw,
        error=error,
    )


def parse_json(text: str) -> JSON:
    """Parse JSON that a policy wrote. Raises only ValueError, with a short message.

    NaN and Infinity are refused: they are not JSON. So are numbers and nesting beyond the interpreter's limits, and an
    object with a member twice, as one of the two would be lost.
    """
    try:
        value: JSON = DECODER.decode(text)
    except json.JSONDecodeError as fault:
        raise ValueError(f"{fault.msg.removesuffix(' at')} at character {fault.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:64]} is too large a number")
    return value


def _members(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError(f"{len(pairs) - len(members)} members of an object are given twice")
    return members


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_members)


def normalise(messages: Sequence[Message]) -> list[Message]:
    """Bring messages to the form that templates expect.

    There are no None fields (parquet fills them in), content is a string, arguments are objects.
    """
    normalised = []
    for message in messages:
        out = cast(Message, {key: value for key, value in message.items() if value is not None})
        content = out.get("content") or ""
        if not isinstance(content, str):  # parts of other kinds than text stay, for the template to judge
            texts = [part if isinstance(part, str) else part.get("text") for part in content]
            content = content if None in texts else "".join(text for text in texts if text is not None)
        out["content"] = content
        calls = out.pop("tool_calls", [])
        if len(calls):
            out["tool_calls"] = [_normalise_call(call) for call in calls]
        normalised.append(out)
    return normalised


def content_text(content: Content) -> str:
    """Write a message's content as text, with parts of other kinds, such as images, as their kind in brackets."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Part] = [{"text": part} if isinstance(part, str) else part for part in content]
    return "".join(f"[{part.get('type')}]" if (text := part.get("text")) is None else text for part in parts)


def _normalise_call(call: ToolCall) -> ToolCall:
    function = cast(
        FunctionCall, {key: value for key, value in call.get("function", call).items() if value is not None}
    )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            decoded = parse_json(arguments) if arguments.strip() else {}
            arguments = decoded if isinstance(decoded, dict) else arguments
        except ValueError:
            pass  # A malformed call of the policy: its text is rendered as it is.
    function["arguments"] = arguments
    out: ToolCall = {"type": "function", "function": function}
    if (id := call.get("id")) is not None:
        out["id"] = id
    return out


def with_broken_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls whose arguments are no object into the text of their turns, as the policy wrote them."""
    out: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        whole = [call for call in calls if not isinstance(call["function"].get("arguments"), str)]
        if len(whole) < len(calls):
            texts = [
                content_text(message["content"]),
                *(_as_text(call["function"]) for call in calls if call not in whole),
            ]
            message = {**message, "content": "\n".join(filter(None, texts)), "tool_calls": whole}
            if not whole:
                del message["tool_calls"]
        out.append(message)
    return out


def _as_text(function: FunctionCall) -> str:
    name, text = function.get("name", ""), str(function.get("arguments"))
    return text if name in text else f"{name} {text}"


def with_named_ids(messages: Sequence[Message], *, by_turn: bool = False) -> list[Message]:
    """Rewrite call ids, and answers' references to them, as `functions.NAME:INDEX` (Kimi K2); such ids stay.

    by_turn: count every turn's calls from 0 and replace all ids, as the first templates of Kimi K2 do.
    """
    renamed: dict[str, str] = {}
    count = 0
    out: list[Message] = []
    for message in messages:
        calls: list[ToolCall] = []
        if by_turn and message["role"] == "assistant":
            count = 0
        for call in message.get("tool_calls", ()):
            id = call.get("id", "")
            if by_turn or not id.startswith("functions."):
                renamed[id] = f"functions.{call['function'].get('name', '')}:{count}"
            count += 1
            calls.append({**call, "id": renamed.get(id, id)})
        message = {**message, "tool_calls": calls} if calls else message
        answered = message.get("tool_call_id", "")
        out.append({**message, "tool_call_id": renamed[answered]} if answered in renamed else message)
    return out
