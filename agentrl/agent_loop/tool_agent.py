"""The tool-calling loop: assistant turns with any number of tool calls, and user turns from an interaction.

A message's calls run concurrently and are answered in call order. A malformed call is answered with a typed error, and
the policy may go on. A turn without calls is the final answer, unless the row has an interaction that answers it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.dialogue import Dialogue
from agentrl.agent_loop.outcome import status_of
from agentrl.agent_loop.registry import register
from agentrl.chat import ParsedCall
from agentrl.tool import ErrorKind
from agentrl.toolset import ToolResult, ToolSession
from agentrl.trajectory import Message, Status, ToolCallRecord

MALFORMED = frozenset({ErrorKind.PARSE, ErrorKind.UNKNOWN_TOOL, ErrorKind.ARGUMENTS})
FINAL_ANSWER_REQUEST = "No more tool calls are possible. Give your final answer now."


@register("tool_agent")
class ToolAgentLoop(AgentLoop):
    """See the module."""

    async def run(self, episode: Episode) -> None:
        context, sample = episode.context, episode.sample
        session = await context.tools.open(episode.session, sample.tools_kwargs)
        try:
            async with Dialogue.open(episode) as dialogue:
                episode.start(sample.prompt, context.tools.schemas)
                status = await self._converse(episode, session, dialogue)
        finally:
            rewards = await session.close()
        for reward in rewards:
            add_turn_reward(episode, reward)
        episode.finish(status)

    async def _converse(self, episode: Episode, session: ToolSession, dialogue: Dialogue) -> Status:
        limits = episode.context.limits
        malformed = 0
        if episode.budget_left <= 0:
            return Status.LENGTH
        while True:
            reply = await episode.generate()
            if (cut := status_of(reply)) is not None:
                return cut
            calls = reply.message.calls
            if calls:
                records, messages = await answer_calls(episode, session, calls)
                malformed += sum(record.error in MALFORMED for record in records)
                if malformed > limits.max_malformed:
                    episode.observe(messages)
                    return Status.MALFORMED
                if episode.assistant_turns >= limits.max_assistant_turns:
                    return await self._last_answer(episode, messages)
            else:
                answer = await dialogue.respond()
                if answer is None:
                    return Status.COMPLETED
                if dialogue.turns > limits.max_user_turns or episode.assistant_turns >= limits.max_assistant_turns:
                    return Status.TURN_LIMIT
                messages = [answer]
            if not episode.observe(messages):
                return Status.LENGTH

    async def _last_answer(self, episode: Episode, messages: list[Message]) -> Status:
        """At the turn limit with calls just answered: ask once more for an answer, and run no more calls."""
        if not episode.context.limits.force_final_answer:
            episode.observe(messages)
            return Status.TURN_LIMIT
        if not episode.observe([*messages, {"role": "user", "content": FINAL_ANSWER_REQUEST}]):
            return Status.LENGTH
        reply = await episode.generate()
        return status_of(reply) or (Status.TURN_LIMIT if reply.message.calls else Status.COMPLETED)


async def answer_calls(
    episode: Episode, session: ToolSession, calls: tuple[ParsedCall, ...]
) -> tuple[list[ToolCallRecord], list[Message]]:
    """Run a message's calls concurrently; records go to the turn that made them, messages are in call order."""
    limit = episode.context.limits.max_parallel_calls
    episode.waiting_for = "tools: " + ", ".join(call.name or "?" for call in calls[:limit])
    begun = time.monotonic()
    if len(calls) == 1:
        results = [await call_tool(session, calls[0])]
    else:
        results = await run_all([call_tool(session, call) for call in calls[:limit]])
        results += [over_limit(limit)] * (len(calls) - len(results))
    episode.tool_seconds += time.monotonic() - begun
    records = [record_of(call, result) for call, result in zip(calls, results, strict=True)]
    episode.trajectory.turns[-1].calls.extend(records)
    for result in results:
        if result.reward is not None:
            add_turn_reward(episode, result.reward)
        for name, value in result.metrics.items():
            episode.trajectory.metrics[name] = episode.trajectory.metrics.get(name, 0.0) + value
    messages: list[Message] = [
        {"role": "tool", "content": result.text, "tool_call_id": call.id, "name": call.name}
        for call, result in zip(calls, results, strict=True)
    ]
    return records, messages


async def call_tool(session: ToolSession, call: ParsedCall) -> ToolResult:
    return await session.call(call.name, call.arguments, parse_error=call.error)


async def run_all(calls: list[Coroutine[Any, Any, ToolResult]]) -> list[ToolResult]:
    """All at once; the first infrastructure fault cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def over_limit(limit: int) -> ToolResult:
    return ToolResult(
        text=f"Error (limit): only the first {limit} tool calls of a message are run; call again.",
        error=ErrorKind.LIMIT,
    )


def record_of(call: ParsedCall, result: ToolResult) -> ToolCallRecord:
    return ToolCallRecord(
        name=call.name,
        arguments=call.arguments,
        response=result.text,
        error=result.error,
        reward=result.reward,
        seconds=result.seconds,
        truncated=result.truncated,
    )


def add_turn_reward(episode: Episode, reward: float) -> None:
    """Add to the reward of the last assistant turn."""
    for turn in reversed(episode.trajectory.turns):
        if turn.role == "assistant":
            turn.reward = reward + (turn.reward or 0.0)
            return
