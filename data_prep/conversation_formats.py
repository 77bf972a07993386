"""Conversations with tool calls, as data sets write them, converted to OpenAI's messages.

Three forms are read: OpenAI's own ({"messages", "tools"}), ShareGPT's ({"conversations": [{"from", "value"}]}, with
calls in turns of their own or in Hermes' tags), and xLAM's ({"query", "tools", "answers"}, arXiv:2409.03215). What a
form cannot say is left for the check of `data_prep.tool_conversations` to find.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentrl.data.messages import with_our_names
from agentrl.system.json_value import JSON
from agentrl.tool import FunctionSchema, ToolSchema


class BadConversation(Exception):
    """Conversation that cannot be read. `reason` is one of a few, to be counted; `detail` says what was found."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation in OpenAI's form."""

    messages: list[dict[str, Any]]
    """Messages of the roles system, user, assistant, tool; calls as {"function": {"name", "arguments"}}, arguments as
    they were."""
    tools: list[ToolSchema]
    ends_with_calls: bool = False
    """True: the data set's conversations end with the calls, which nothing answers."""


def conversation(fields: Mapping[str, JSON]) -> Conversation:
    """Convert a record. Raises BadConversation."""
    if "messages" in fields:
        return Conversation([with_our_names(message) for message in mappings(fields, "messages")], tools_of(fields))
    if "conversations" in fields:
        return sharegpt(fields)
    if "query" in fields and "answers" in fields:
        return xlam(fields)
    keys = ", ".join(sorted(map(str, fields)))
    raise BadConversation("unknown form", f"no messages, no conversations, no query with answers, but {keys}")


def tools_of(fields: Mapping[str, JSON]) -> list[ToolSchema]:
    """Read the field `tools`, if there is one."""
    return [wrapped(tool) for tool in mappings(fields, "tools")] if fields.get("tools") else []


def wrapped(tool: dict[str, Any]) -> ToolSchema:
    """Wrap a function as a tool; some sets leave the outer mapping out."""
    # Checked when calls are (tool_conversations.argument_check).
    return (
        cast(ToolSchema, tool) if "function" in tool else {"type": "function", "function": cast(FunctionSchema, tool)}
    )


def mappings(fields: Mapping[str, JSON], key: str) -> list[dict[str, Any]]:
    """Read a list of mappings, which may be JSON text. Raises BadConversation."""
    value = fields[key]
    if isinstance(value, str):
        value = parsed(value, key)
    found = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    if not isinstance(value, list) or len(found) < len(value):
        raise BadConversation(f"`{key}` is no list of mappings", repr(value)[:80])
    return found


def parsed(text: str, what: str) -> JSON:
    """Parse JSON. Raises BadConversation."""
    try:
        value: JSON = json.loads(text)
        return value
    except (ValueError, RecursionError) as error:
        raise BadConversation(f"{what}: not JSON", f"{text[:80]!r} ({error})") from error


ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "tool": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\s*(.*?)\s*</tools>", re.DOTALL)


def sharegpt(fields: Mapping[str, JSON]) -> Conversation:
    """Convert a conversation in ShareGPT's form.

    A system message with `<tools>` is where Hermes explains tools and tags: only the tools are kept, because the chat
    template explains them anew.
    """
    messages: list[dict[str, Any]] = []
    tools = tools_of(fields)
    system = fields.get("system")
    if isinstance(system, str) and system.strip():
        messages.append({"role": "system", "content": system})
    for turn in mappings(fields, "conversations"):
        role, value = ROLES.get(str(turn.get("from"))), turn.get("value")
        if role is None or not isinstance(value, str):
            raise BadConversation("a turn without a known `from` and a text as `value`", repr(turn)[:80])
        if role == "system" and (listed := _TOOLS.search(value)):
            if not tools:
                functions = parsed(listed[1], "<tools>")
                listed_tools = functions if isinstance(functions, list) else []
                tools = [wrapped(tool) for tool in listed_tools if isinstance(tool, dict)]
        else:
            further = {name: value for name, value in turn.items() if name not in ("from", "value")}
            messages.extend(with_our_names({**further, **message}) for message in turn_messages(role, value))
    return Conversation(messages, tools)


def turn_messages(role: str, value: str) -> Iterator[dict[str, Any]]:
    """Convert one turn of ShareGPT's form."""
    if role == "call":
        calls = parsed(value, "function_call")
        yield calling("", calls if isinstance(calls, list) else [calls])
    elif role == "assistant" and "<tool_call>" in value:
        calls = [parsed(text, "<tool_call>") for text in _CALL.findall(value)]
        yield calling(_CALL.sub("", value).strip(), calls)
    elif role == "tool" and "<tool_response>" in value:
        for text in _RESPONSE.findall(value):
            yield {"role": "tool", "content": text}
    else:
        yield {"role": role, "content": value}


def calling(text: str, calls: Sequence[JSON]) -> dict[str, Any]:
    """Make an assistant message with calls. A call that is no mapping is kept as it is, for the check to name."""
    tool_calls = [
        {
            "type": "function",
            "function": {
                "name": call.get("name"),
                "arguments": call.get("arguments", call.get("parameters", {})),
            },
        }
        if isinstance(call, dict)
        else call
        for call in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": tool_calls}


_TYPES = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "number",
    "number": "number",
    "bool": "boolean",
    "boolean": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "array": "array",
    "dict": "object",
    "object": "object",
}


def xlam(fields: Mapping[str, JSON]) -> Conversation:
    """Convert a conversation in xLAM's form."""
    if not isinstance(fields["query"], str):
        raise BadConversation("`query` is no text", repr(fields["query"])[:80])
    answers = mappings(fields, "answers")
    if not answers:
        raise BadConversation("no calls", "`answers` is empty")
    messages: list[dict[str, Any]] = [{"role": "user", "content": fields["query"]}, calling("", list(answers))]
    return Conversation(messages, [xlam_tool(tool) for tool in mappings(fields, "tools")], ends_with_calls=True)


def xlam_tool(tool: dict[str, Any]) -> ToolSchema:
    """Convert a tool with parameters {name: {type, description, default}} and Python's types: `List[int], optional`."""
    parameters = tool.get("parameters")
    if not isinstance(parameters, dict) or parameters.get("type") == "object":
        return wrapped(tool)
    properties, required = {}, []
    for name, told in parameters.items():
        if not isinstance(told, dict):
            raise BadConversation("a tool's schema", f"parameter {name!r} is {told!r}"[:80])
        written = str(told.get("type", ""))
        kind = _TYPES.get(re.split(r"[\[,\s]", written.lower(), maxsplit=1)[0])
        properties[name] = {
            **({"type": kind} if kind else {}),
            **({"description": told["description"]} if isinstance(told.get("description"), str) else {}),
        }
        if "optional" not in written.lower() and "default" not in told:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    described: dict[str, Any] = {key: tool[key] for key in ("name", "description") if key in tool}
    return wrapped({**described, "parameters": schema})
