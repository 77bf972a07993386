"""One trajectory's use of its interaction."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

from agentrl.agent_loop.base import Episode
from agentrl.agent_loop.compactor import Observe
from agentrl.errors import DataError
from agentrl.interaction import Interaction, InteractionResponse, ask
from agentrl.system.call_journal import Codec, answered, as_json, fields_as_json
from agentrl.system.deadline import within
from agentrl.system.numbers import finite_numbers
from agentrl.system.user_code import user_code
from agentrl.trajectory import Message
from agentrl.trajectory.picture import joined

OPENINGS: Codec[str | None] = Codec(as_json, json.loads)
RESPONSES: Codec[InteractionResponse] = Codec(
    fields_as_json, lambda content: InteractionResponse(**json.loads(content))
)
SCORES: Codec[float | None] = Codec(as_json, json.loads)


@dataclass(slots=True)
class Dialogue:
    """Source of user turns from the row's interaction; without one, every answer is final."""

    episode: Episode
    interaction: Interaction | None
    turns: int = 0
    """Number of user turns asked for."""
    turn_score: float = 0.0
    """Sum of the turns' scores."""

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(episode: Episode) -> AsyncIterator[Dialogue]:
        """Start the row's interaction, and finalize it exactly once, however the trajectory ends."""
        sample = episode.sample
        kwargs = dict(sample.interaction_kwargs)
        if not kwargs or not (sample.interaction or episode.context.interactions):
            yield Dialogue(episode, None)
            return
        interaction = _find(episode, kwargs.pop("name", None))
        timeout, who = episode.context.limits.call_timeout, f"interaction {interaction.name}"

        async def finalize() -> None:
            async with within(timeout):
                await ask(interaction, interaction.finalize_interaction, episode.session)

        episode.waiting_for = who
        async with within(timeout):
            await ask(interaction, interaction.start_interaction, episode.session, **kwargs)
        try:
            dialogue = Dialogue(episode, interaction)
            yield dialogue
            async with within(timeout):
                score = await answered(
                    episode.journal,
                    who,
                    "calculate_score",
                    None,
                    lambda: ask(interaction, interaction.calculate_score, episode.session),
                    SCORES,
                )
        except BaseException:
            with contextlib.suppress(Exception):  # a fault at the end must not hide the first one, or a cancellation
                await finalize()
            raise
        await finalize()
        if score is not None:
            extra = episode.trajectory.score_extra
            extra["interaction_score"] = float(score)
            extra["interaction_turn_score"] = dialogue.turn_score

    async def opening(self, prompt: list[Message]) -> list[Message]:
        """Return the prompt with the interaction's first message."""
        if (interaction := self.interaction) is None:
            return prompt
        async with within(self.episode.context.limits.call_timeout):
            text = await answered(
                self.episode.journal,
                f"interaction {interaction.name}",
                "open_dialogue",
                prompt,
                lambda: ask(interaction, interaction.open_dialogue, self.episode.session, list(prompt)),
                OPENINGS,
            )
        if text is None:
            return prompt
        self.episode.state = text
        return with_opening(prompt, text)

    async def respond(self) -> InteractionResponse | None:
        """Ask for the answer to the last assistant turn, and set that turn's reward; None when the dialogue is over."""
        if (interaction := self.interaction) is None:
            return None
        episode, trajectory = self.episode, self.episode.trajectory
        episode.waiting_for = f"interaction {interaction.name}"
        turn = trajectory.turns[-1]  # now: a branch may add turns of its own meanwhile
        async with within(episode.context.limits.call_timeout):
            answer = await answered(
                episode.journal,
                episode.waiting_for,
                "generate_response",
                episode.messages,
                lambda: ask(interaction, interaction.generate_response, episode.session, list(episode.messages)),
                RESPONSES,
            )
        self.turns += 1
        score = float(answer.score)
        self.turn_score += score
        turn.reward = score + (turn.reward or 0.0)
        trajectory.score_extra |= finite_numbers(f"interaction {interaction.name}", answer.extra)
        return None if answer.should_end else answer

    async def show(self, answer: InteractionResponse, observe: Observe) -> bool:
        """Append the answer by `observe`, or continue from its rewritten history in a new transcript.

        Returns whether there is room.
        """
        said: list[Message] = [{"role": "user", "content": answer.text}]
        self.episode.state = answer.state
        if answer.history is None:
            return await observe(said)
        # A new transcript, never a change of the old one: sampled turns stay unchanged, and are trained on.
        history = [*answer.history, *(said if answer.text else ())]
        assert self.interaction is not None
        # A message of a form that the chat template cannot write is the interaction's error.
        with user_code(f"interaction {self.interaction.name}", self.interaction.generate_response):
            await self.episode.start(history, self.episode.tools)
        return self.episode.budget_left > 0


def with_opening(prompt: list[Message], text: str) -> list[Message]:
    """Add the first text of the other side to the prompt: to its last message if the user wrote that."""
    last = prompt[-1]
    if last["role"] == "user":  # many chat templates refuse two user turns in a row
        return [*prompt[:-1], {**last, "content": joined(last["content"], f"\n\n{text}")}]
    return [*prompt, {"role": "user", "content": text}]


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
