"""Loops of one prompt and one answer."""

from __future__ import annotations

import json

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.stopping import after_turn
from agentrl.errors import DataError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, Status
from agentrl.trajectory.sample import Sample


class SingleTurnLoop(AgentLoop):
    """Loop that generates once; no tools are offered."""

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        return sample.prompt, []

    async def run(self, episode: Episode) -> None:
        await episode.start(*self.first_prompt(episode.sample, []))
        if episode.budget_left <= 0:
            return episode.finish(Status.LENGTH)
        reply = await episode.generate()
        episode.finish(after_turn(episode, reply) or Status.COMPLETED)


class SingleTurnCallsLoop(SingleTurnLoop):
    """Loop that generates once, with the tools of the row: `extra_info.tools`, JSON text of OpenAI's schemas.

    Calls are recorded in the messages and not run: a scorer that asks for the trajectory judges them.
    """

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        """Raises DataError for a row without tools."""
        given = sample.extra_info.get("tools")
        try:
            found = json.loads(given) if isinstance(given, str) else given
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(one, dict) and "function" in one for one in found):
            raise DataError(
                f"extra_info.tools: expected JSON text with a list of OpenAI's tool schemas, found {given!r:.80}"
            )
        return sample.prompt, found
