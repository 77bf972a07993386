"""Tool-calling loop: assistant turns with any number of tool calls, and user turns from an interaction.

A message's calls run concurrently and are answered in call order. A malformed call is answered with a typed error, and
the policy may continue. A turn without calls is the final answer, unless the row has an interaction that answers it.
An interaction that rewrites the history opens a new transcript, which has the full token budgets again; limits of
turns and time stay.
"""

from __future__ import annotations

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.compactor import observing
from agentrl.agent_loop.dialogue import Dialogue
from agentrl.agent_loop.stopping import after_calls, after_turn
from agentrl.agent_loop.tool_calls import FINAL_ANSWER_REQUEST
from agentrl.trajectory import Message, Status


class ToolAgentLoop(AgentLoop):
    """Loop of tool calls in the chat template's own format, and of user turns from an interaction."""

    takes_interactions = True
    offers_tools = True
    compacts = True

    async def run(self, episode: Episode) -> None:
        await episode.open_tools()
        async with Dialogue.open(episode) as dialogue:
            prompt, tools = self.first_prompt(episode.sample, episode.context.tools.schemas)
            await episode.start(await dialogue.opening(prompt), tools)
            status = await self._converse(episode, dialogue)
        episode.finish(status)

    async def _converse(self, episode: Episode, dialogue: Dialogue) -> Status:
        limits, observe = episode.context.limits, observing(episode)
        if episode.budget_left <= 0:
            return Status.LENGTH
        while True:
            reply = await episode.generate()
            if (ended := after_turn(episode, reply)) is not None:
                return ended
            calls = reply.message.calls
            if calls:
                _, messages = await episode.answer_calls(calls)
                if (ended := after_calls(episode, reply)) is not None:
                    await episode.observe(messages)
                    return ended
                if episode.assistant_turns >= limits.max_assistant_turns:
                    return await self._last_answer(episode, dialogue, messages)
                room = await observe(messages)
            else:
                answer = await dialogue.respond()
                if answer is None:
                    return Status.COMPLETED
                if dialogue.turns > limits.max_user_turns or episode.assistant_turns >= limits.max_assistant_turns:
                    return Status.TURN_LIMIT
                room = await dialogue.show(answer, observe)
            if not room:
                return Status.LENGTH

    async def _last_answer(self, episode: Episode, dialogue: Dialogue, messages: list[Message]) -> Status:
        """Ask once more for an answer, at the turn limit with calls just answered, and run no more calls."""
        if not episode.context.limits.force_final_answer:
            await episode.observe(messages)
            return Status.TURN_LIMIT
        if not await episode.observe([*messages, {"role": "user", "content": FINAL_ANSWER_REQUEST}]):
            return Status.LENGTH
        reply = await episode.generate()
        if (ended := after_turn(episode, reply)) is not None:
            return ended
        if reply.message.calls:
            return Status.TURN_LIMIT
        return Status.COMPLETED if await dialogue.respond() is None else Status.TURN_LIMIT
