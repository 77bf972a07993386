"""Loop of one prompt and one answer."""

from __future__ import annotations

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.stopping import after_turn
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
