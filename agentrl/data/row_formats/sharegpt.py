"""ShareGPT's conversations: turns of `from` and `value`, with calls in turns of their own or in Hermes' tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.chat.message import parse_json
from agentrl.data.messages import Unfit, message_list
from agentrl.data.row_formats.format import Conversation, Row, RowFormat
from agentrl.system.json_value import JSON

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}


def read_sharegpt(row: Row) -> Conversation:
    """Convert a row. Raises Unfit.

    A system message with `<tools>` is where Hermes explains tools and tags: only the tools are kept, because the chat
    template explains them in its own way.
    """
    messages: list[dict[str, object]] = []
    tools = row.get("tools")
    if tools in (None, "", "[]", []):
        tools = None
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise Unfit("column system", "text", system)
    if system and system.strip():
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(message_list(row["conversations"], "column conversations")):
        place = f"column conversations, turn {number}"
        given = {name: value for name, value in turn.items() if value is not None}
        if "from" not in given and "role" in given:  # OpenAI's messages under ShareGPT's name
            messages.append(given)
            continue
        role, value = ROLES.get(str(given.pop("from", None))), given.pop("value", None)
        if role is None or not isinstance(value, str):
            raise Unfit(place, f"a known `from` ({', '.join(ROLES)}) and a text as `value`", turn)
        if role == "system" and "<tools>" in value:
            filled = [text for text in _tagged(value, "tools", place)[1] if text.strip()]  # it names the tags before
            tools = tools or _parsed(filled[0] if filled else "", f"{place}, <tools>")
        else:
            messages.extend({**given, **message} for message in _messages(role, value, place))
    return Conversation(messages, tools)


def _messages(role: str, value: str, place: str) -> Iterator[dict[str, object]]:
    if role == "call":
        calls = _parsed(value, f"{place}, function_call")
        yield calling("", calls if isinstance(calls, list) else [calls])
    elif role == "assistant" and "<tool_call>" in value:
        said, written = _tagged(value, "tool_call", place)
        yield calling(said.strip(), [_parsed(text, f"{place}, <tool_call>") for text in written])
    elif role == "tool" and "<tool_response>" in value:
        for text in _tagged(value, "tool_response", place)[1]:
            yield {"role": "tool", "content": text.strip()}
    else:
        yield {"role": role, "content": value}


def _tagged(text: str, tag: str, place: str) -> tuple[str, list[str]]:
    """Return the text outside the tags, and the texts in them. Raises Unfit for a tag that is not closed."""
    outside, *parts = text.split(f"<{tag}>")
    inside = []
    for part in parts:
        body, close, after = part.partition(f"</{tag}>")
        if not close:
            raise Unfit(place, f"</{tag}> after each <{tag}>", text)
        inside.append(body)
        outside += after
    return outside, inside


def _parsed(text: str, place: str) -> JSON:
    try:
        return parse_json(text)
    except ValueError as error:
        raise Unfit(place, f"JSON ({error})", text) from None


def calling(text: str, calls: Sequence[JSON]) -> dict[str, object]:
    """Make an assistant message with calls. A call that is no mapping stays as it is, for a later check to name."""
    tool_calls = [
        {"type": "function", "function": {"name": call.get("name"), "arguments": _arguments(call)}}
        if isinstance(call, dict)
        else call
        for call in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": tool_calls}


def _arguments(call: dict[str, JSON]) -> JSON:
    return call.get("arguments", call.get("parameters", {}))


FORMAT = RowFormat(("conversations",), read_sharegpt, ("tools", "system"))
