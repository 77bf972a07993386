"""Conversations with tools, and the transcript that a policy leaves which samples their assistant turns."""

from __future__ import annotations

from itertools import groupby

from agentrl.chat import Chat
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, ToolCall

TOOLS: list[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}},
                "required": ["expression"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]


def call(id: str, name: str = "calculator", **arguments: JSON) -> ToolCall:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str = "", calls: int = 0, reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [call(f"call{n:05d}", expression=f"{n} + 2", digits=n) for n in range(calls)]
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def answers(calls: int) -> list[Message]:
    return [
        {"role": "tool", "content": f"result {n}: {n + 2}", "name": "calculator", "tool_call_id": f"call{n:05d}"}
        for n in range(calls)
    ]


def conversation(*turns: Message) -> list[Message]:
    """The turns with tool answers, or a user's request to go on, between them; it ends with the last turn."""
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    for turn in turns:
        messages += [turn, *(answers(len(turn["tool_calls"])) if "tool_calls" in turn else [GO_ON])]
    return messages[: messages.index(turns[-1]) + 1] if turns else messages


GO_ON: Message = {"role": "user", "content": "Go on."}


def sampled_turns(ids: list[int], mask: list[int]) -> list[list[int]]:
    """The runs of ids with mask 1."""
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [[id for id, _ in run] for is_sampled, run in runs if is_sampled]


def roll_out(chat: Chat, messages: list[Message], turns: list[list[int]]) -> list[int]:
    """The transcript as a loop builds it: first prompt, then sampled turns with a bridge between them."""
    last = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    ids = chat.render(messages[: last[0]], TOOLS)
    for turn, index, following in zip(turns, last, [*last[1:], None], strict=True):
        ids += turn
        if following is not None:
            ids += chat.bridge(ids, messages[index + 1 : following], TOOLS)
    return ids
