"""Tool calls of an assistant turn: run concurrently, recorded with the turn, answered in call order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from agentrl.agent_loop.base import Episode
from agentrl.chat import ParsedCall
from agentrl.system.quota import run_concurrently
from agentrl.tool import ErrorKind
from agentrl.tool.session import ToolResult, ToolSession
from agentrl.trajectory import Message, ToolCallRecord
from agentrl.trajectory.picture import image_part

FINAL_ANSWER_REQUEST = "No more tool calls are possible. Give your final answer now."


@contextlib.asynccontextmanager
async def open_tools(episode: Episode, *, images: bool = True) -> AsyncIterator[ToolSession]:
    """Open the trajectory's tools, and close them however it ends; their rewards then go to its last assistant turn.

    Without `images`, images of answers are left out, with a note.
    """
    session = await episode.context.tools.open(episode.session, episode.sample.tools_kwargs, images=images)
    try:
        yield session
    except BaseException:
        with contextlib.suppress(Exception):  # a fault at the end must not hide the first one, or a cancellation
            await session.close()
        raise
    for reward in await session.close():
        add_turn_reward(episode, reward)


async def answer_calls(
    episode: Episode, session: ToolSession, calls: tuple[ParsedCall, ...]
) -> tuple[list[ToolCallRecord], list[Message]]:
    """Run a message's calls concurrently; return their records and the messages that answer them, in call order.

    The records are added to the turn that made the calls.
    """
    limit = episode.context.limits.max_parallel_calls
    episode.waiting_for = "tools: " + ", ".join(call.name or "?" for call in calls[:limit])
    turn = episode.trajectory.turns[-1]  # now: a branch may add turns of its own while the tools run
    begun = time.monotonic()
    if len(calls) == 1:
        results = [await call_tool(session, calls[0])]
    else:
        results = await run_concurrently(call_tool(session, call) for call in calls[:limit])
        results += [over_limit(limit)] * (len(calls) - len(results))
    episode.tool_seconds += time.monotonic() - begun
    records = [record_of(call, result) for call, result in zip(calls, results, strict=True)]
    turn.calls.extend(records)
    for result in results:
        if result.reward is not None:
            turn.reward = result.reward + (turn.reward or 0.0)
        for name, value in result.metrics.items():
            episode.trajectory.metrics[name] = episode.trajectory.metrics.get(name, 0.0) + value
    messages: list[Message] = [
        {"role": "tool", "content": content_of(result), "tool_call_id": call.id, "name": call.name}
        for call, result in zip(calls, results, strict=True)
    ]
    return records, messages


def content_of(result: ToolResult) -> str | list[dict[str, Any]]:
    """Return a tool message's content: text, or images and text."""
    if not result.images:
        return result.text
    return [*map(image_part, result.images), {"type": "text", "text": result.text}]


async def call_tool(session: ToolSession, call: ParsedCall) -> ToolResult:
    """Run one call of the policy in the trajectory's tool session."""
    return await session.call(call.name, call.arguments, parse_error=call.error)


def over_limit(limit: int) -> ToolResult:
    """Make the answer to a call beyond the `limit` of one message."""
    return ToolResult(
        text=f"Error (limit): only the first {limit} tool calls of a message are run; call again.",
        error=ErrorKind.LIMIT,
    )


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


def add_turn_reward(episode: Episode, reward: float) -> None:
    """Add to the reward of the last assistant turn."""
    for turn in reversed(episode.trajectory.turns):
        if turn.role == "assistant":
            turn.reward = reward + (turn.reward or 0.0)
            return
