"""Tool calls of an assistant turn: run concurrently, recorded with the turn, answered in call order."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat import ParsedCall
from agentrl.system.quota import run_concurrently
from agentrl.tool import ErrorKind
from agentrl.tool.session import ToolResult, ToolSession
from agentrl.trajectory import Message, Part, ToolCallRecord, Turn
from agentrl.trajectory.picture import image_part

FINAL_ANSWER_REQUEST = "No more tool calls are possible. Give your final answer now."


async def run_calls(session: ToolSession, calls: Sequence[ParsedCall], limit: int) -> list[ToolResult]:
    """Run the first `limit` calls concurrently, and answer the rest with an error; the results are in call order."""
    if len(calls) == 1:
        return [await session.call(calls[0].name, calls[0].arguments, parse_error=calls[0].error)]
    results = await run_concurrently(
        session.call(call.name, call.arguments, parse_error=call.error) for call in calls[:limit]
    )
    text = f"Error (limit): only the first {limit} tool calls of a message are run; call again."
    return [*results, *[ToolResult(text=text, error=ErrorKind.LIMIT)] * (len(calls) - len(results))]


def answer_to(call: ParsedCall, result: ToolResult) -> Message:
    """Make the message that answers a call."""
    content: str | list[Part] = result.text
    if result.images:
        content = [*map(image_part, result.images), {"type": "text", "text": result.text}]
    return {"role": "tool", "content": content, "tool_call_id": call.id, "name": call.name}


def record_of(call: ParsedCall, result: ToolResult) -> ToolCallRecord:
    """Make the record of a call and its result."""
    return ToolCallRecord(
        name=call.name,
        arguments=call.arguments,
        response=result.text,
        error=result.error,
        reward=result.reward,
        seconds=result.seconds,
        truncated=result.truncated,
        files=result.files,
    )


def record_calls(turn: Turn, records: Sequence[ToolCallRecord]) -> None:
    """Add calls, and the rewards that they earned, to the turn."""
    turn.calls.extend(records)
    for record in records:
        if record.reward is not None:
            turn.reward = record.reward + (turn.reward or 0.0)
