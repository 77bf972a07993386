"""The interaction's side of one trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from agentrl.agent_loop.base import Episode
from agentrl.errors import DataError
from agentrl.interaction import Interaction
from agentrl.trajectory import Message


@dataclass(slots=True)
class Dialogue:
    """Asks the row's interaction for user turns; without one, every answer is final."""

    episode: Episode
    interaction: Interaction | None
    turns: int = 0
    """User turns asked for."""

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(episode: Episode) -> AsyncIterator[Dialogue]:
        """Starts the row's interaction and finalizes it exactly once, however the trajectory ends."""
        kwargs = dict(episode.sample.interaction_kwargs)
        if not kwargs:
            yield Dialogue(episode, None)
            return
        interaction = _find(episode, kwargs.pop("name", None))
        timeout = episode.context.limits.call_timeout

        async def finalize() -> None:
            async with asyncio.timeout(timeout):
                await interaction.finalize_interaction(episode.session)

        async with asyncio.timeout(timeout):
            await interaction.start_interaction(episode.session, **kwargs)
        try:
            yield Dialogue(episode, interaction)
            async with asyncio.timeout(timeout):
                score = await interaction.calculate_score(episode.session)
        except BaseException:
            with contextlib.suppress(Exception):  # a fault at the end must not hide the first one, or a cancellation
                await finalize()
            raise
        await finalize()
        if score is not None:
            episode.trajectory.score_extra["interaction_score"] = _finite(interaction, score)

    async def respond(self) -> Message | None:
        """The user's answer to the last assistant turn, whose reward it sets; None when the dialogue is over."""
        if self.interaction is None:
            return None
        episode = self.episode
        episode.waiting_for = f"interaction {self.interaction.name}"
        async with asyncio.timeout(episode.context.limits.call_timeout):
            answer = await self.interaction.generate_response(episode.session, list(episode.trajectory.messages))
        self.turns += 1
        turn = episode.trajectory.turns[-1]
        turn.reward = _finite(self.interaction, answer.score) + (turn.reward or 0.0)
        return None if answer.should_end else {"role": "user", "content": answer.text}


def _finite(interaction: Interaction, score: float) -> float:
    if not math.isfinite(score):
        raise ValueError(f"interaction {interaction.name}: the score is {score}")
    return float(score)


def _find(episode: Episode, name: str | None) -> Interaction:
    known = episode.context.interactions
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name not in known:
        sample = episode.sample
        raise DataError(
            f"{sample.file} row {sample.row}: interaction_kwargs.name is {name!r}, but the configured interactions are "
            f"{sorted(known) or 'none'}: set actor_rollout_ref.rollout.multi_turn.interaction_config_path"
        )
    return known[name]
