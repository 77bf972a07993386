"""Loops whose actions are plain text: the whole loop is one assistant turn of the chat template.

The policy is stopped where an action ends, the tool's answer is appended as plain-text tokens with mask 0, and it goes
on from there. So no template stands between its turns.
"""

from __future__ import annotations

from abc import abstractmethod

from agentrl.agent_loop.base import AgentLoop, Episode, Reply
from agentrl.agent_loop.compactor import compactor_of
from agentrl.agent_loop.stopping import after_calls, after_turn
from agentrl.chat import ParsedCall
from agentrl.trajectory import Message, Status, ToolCallRecord
from agentrl.trajectory.picture import joined


class InlineLoop(AgentLoop):
    """Base class of such loops: subclasses say which texts end an action, how one is read, and how it is answered."""

    compacts = True
    stops: tuple[str, ...]
    """Texts at which the policy is stopped."""

    @abstractmethod
    def action(self, episode: Episode, reply: Reply) -> ParsedCall | None:
        """Return the call that the turn just sampled ends with, well-formed or not; None: the turn is the final
        answer."""

    @abstractmethod
    async def respond(self, episode: Episode, reply: Reply, record: ToolCallRecord, last: bool) -> bool:
        """Append the result of the call; `last`: with the request for a final answer. Returns whether there is room."""

    def said(self, episode: Episode, reply: Reply) -> str:
        """Return the text of the turn just sampled, for `action`, for scorers and for people.

        A chat format reads a turn as if it began there. Where prompts open reasoning, it takes all that follows an
        observation for reasoning: such a turn's text is what was written.
        """
        return reply.message.text or as_written(episode)

    async def run(self, episode: Episode) -> None:
        await episode.open_tools(images=False)
        await episode.start(*self.first_prompt(episode.sample, episode.context.tools.schemas))
        episode.finish(await self._converse(episode))

    async def _converse(self, episode: Episode) -> Status:
        limits, compactor = episode.context.limits, compactor_of(episode)
        if episode.budget_left <= 0:
            return Status.LENGTH
        while True:
            reply = await self._generate(episode)
            if (ended := after_turn(episode, reply)) is not None:
                return ended
            call = self.action(episode, reply)
            if call is None:
                return Status.COMPLETED
            (record,), _ = await episode.answer_calls((call,))
            at_limit = episode.assistant_turns >= limits.max_assistant_turns
            last = at_limit and limits.force_final_answer
            room = await self.respond(episode, reply, record, last)
            if (ended := after_calls(episode, reply)) is not None:
                return ended
            if compactor is not None and not at_limit:
                room = await compactor.after_text(room)
            if not room:
                return Status.LENGTH
            if at_limit:
                return await self._last_answer(episode) if last else Status.TURN_LIMIT

    async def _generate(self, episode: Episode) -> Reply:
        reply = await episode.generate(stop=self.stops)
        episode.trajectory.turns[-1].text = self.said(episode, reply)
        return reply

    async def _last_answer(self, episode: Episode) -> Status:
        reply = await self._generate(episode)
        if (ended := after_turn(episode, reply)) is not None:
            return ended
        return Status.COMPLETED if self.action(episode, reply) is None else Status.TURN_LIMIT


def as_written(episode: Episode) -> str:
    """Decode the turn just sampled, without its stop token."""
    turn, chat = episode.trajectory.turns[-1], episode.context.chat
    ids = episode.transcript.ids[turn.start : turn.end]
    return chat.decode(ids[:-1] if ids and ids[-1] in chat.stop_token_ids else ids)


def with_system(prompt: list[Message], system: str) -> list[Message]:
    """Return the prompt with `system` as its system message, or before the text of the one it has."""
    if prompt and prompt[0]["role"] == "system":
        return [{**prompt[0], "content": joined(prompt[0]["content"], f"{system}\n\n", before=True)}, *prompt[1:]]
    return [{"role": "system", "content": system}, *prompt]
