"""Tool calls of an assistant turn: run concurrently, recorded with the turn, answered in call order."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat import ParsedCall
from agentrl.system.quota import run_concurrently
from agentrl.tool.answers import over_limit
from agentrl.tool.session import ToolSession
from agentrl.trajectory import Message, Part, ToolCallRecord, Turn
from agentrl.trajectory.picture import image_part

FINAL_ANSWER_REQUEST = "No more tool calls are possible. Give your final answer now."


async def run_calls(session: ToolSession, calls: Sequence[ParsedCall], limit: int) -> list[ToolCallRecord]:
    """Run the first `limit` calls concurrently, and answer the rest with an error; the records are in call order."""
    asked = [session.call(call.name, call.arguments, parse_error=call.error) for call in calls[:limit]]
    answers = [await asked[0]] if len(asked) == 1 else await run_concurrently(asked)  # one needs no task of its own
    if len(calls) > limit:
        answers += [await session.shown(over_limit(limit))] * (len(calls) - limit)
    return [ToolCallRecord(call.name, call.arguments, answer) for call, answer in zip(calls, answers, strict=True)]


def answer_to(call: ParsedCall, record: ToolCallRecord) -> Message:
    """Make the message that answers a call."""
    content: str | list[Part] = record.response
    if record.answer.images:
        content = [*map(image_part, record.answer.images), {"type": "text", "text": record.response}]
    return {"role": "tool", "content": content, "tool_call_id": call.id, "name": call.name}


def record_calls(turn: Turn, records: Sequence[ToolCallRecord]) -> None:
    """Add calls, and the rewards that they earned, to the turn."""
    turn.calls.extend(records)
    for record in records:
        if record.reward is not None:
            turn.reward = record.reward + (turn.reward or 0.0)
