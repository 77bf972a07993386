"""Eleven kinds of conversation. Each text ends with a word that stands nowhere else."""

from __future__ import annotations

from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

TOOLS: list[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look for something.",
            "parameters": {
                "type": "object",
                "properties": {
                    "count": {"type": "integer", "description": "How many."},
                    "ratio": {"type": "number", "description": "How exact."},
                    "deep": {"type": "boolean", "description": "Whether to look deeper."},
                    "tags": {"type": "array", "items": {"type": "string"}, "description": "Words."},
                    "query": {"type": "string", "description": "A text."},
                },
                "required": ["query"],
            },
        },
    }
    for name in ("search", "look_up")
]
ODD = 'it\'s "so" \\ {x: [1]}, <b>&amp; (a=1)\n\n  é中😀 %} # `code` '
SYSTEM: Message = {"role": "system", "content": "Be brief. Wsystem"}
ASKED: Message = {"role": "user", "content": "What is there? Wasked"}
GO_ON: Message = {"role": "user", "content": "Go on then. Wgoon"}
LAST: Message = {"role": "assistant", "content": "That is all. Wlast"}


def call(number: int, name: str = "search", **others: JSON) -> JSON:
    text = others.pop("query", "number")
    arguments = {**others, "query": f"{text} Wcall{number}Q"}
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: JSON, content: str | None = "", reasoning: str | None = None) -> Message:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message  # type: ignore[return-value]


def answer(number: int, content: str | None = None, name: str = "search") -> Message:
    said = f"Found: Wanswer{number}Q" if content is None else content
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{number}", "content": said}


VARIED: dict[str, JSON] = {"count": 3, "ratio": 0.5, "deep": True, "tags": ["a", "b c"]}
KINDS: dict[str, tuple[list[Message], bool]] = {
    "calls": ([SYSTEM, ASKED, calling(call(1, "search", **VARIED)), answer(1), LAST], True),
    "no system": ([ASKED, calling(call(1)), answer(1), LAST], True),
    "parallel": (
        [ASKED, calling(call(1), call(2, "look_up", count=-2)), answer(1), answer(2, name="look_up"), LAST],
        True,
    ),
    "text beside a call": ([ASKED, calling(call(1), content="I look for it. Wbeside"), answer(1), LAST], True),
    "empty content": ([ASKED, calling(call(1), content=None), answer(1, ""), LAST], True),
    "odd text": (
        [
            {**SYSTEM, "content": f"{ODD}Wsystem"},
            {**ASKED, "content": f"{ODD}Wasked"},
            calling(call(1, query=ODD, tags=[ODD, "'", '"'])),
            answer(1, f"{ODD}Wanswer1Q"),
            {**LAST, "content": f"So: {ODD}Wlast"},
        ],
        True,
    ),
    "four calls in a chain": (
        [ASKED, *(message for n in range(1, 5) for message in (calling(call(n)), answer(n))), LAST],
        True,
    ),
    "plain turns": ([SYSTEM, ASKED, {"role": "assistant", "content": "Some. Wsome"}, GO_ON, LAST], False),
    "tools unused": ([ASKED, {"role": "assistant", "content": "Some. Wsome"}, GO_ON, LAST], True),
    "tool, then user": ([ASKED, calling(call(1)), answer(1), {**LAST, "content": "Some. Wsome"}, GO_ON, LAST], True),
    "reasoning": (
        [
            ASKED,
            calling(call(1), reasoning="I should look. Wthought1"),
            answer(1),
            {**LAST, "reasoning_content": "I have it. Wthought2"},
        ],
        True,
    ),
}
"""By name: the messages, and whether there are tools."""
