"""What an agent loop is given and what it implements.

A loop never handles token ids. It talks to an `Episode`, which asks the engine, records exactly what was sampled and
appends what was observed; so a user's loop cannot break the invariants of the transcript.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.agent_loop.limits import LoopLimits, seed_of
from agentrl.chat import AssistantMessage, Chat, Drift
from agentrl.data.sample import Sample
from agentrl.interaction import Interaction
from agentrl.rollout.engine import FinishReason, Generation, RolloutEngine, SamplingParams
from agentrl.tool import ToolSchema
from agentrl.toolset import ToolSet
from agentrl.trajectory import Message, Status, Trajectory, Transcript, Turn

CUT_MARKER = "\n[cut: the token budget is used up]"


@dataclass(frozen=True, slots=True)
class LoopContext:
    """What all trajectories of a run share."""

    engine: RolloutEngine
    chat: Chat
    tools: ToolSet
    interactions: dict[str, Interaction]
    limits: LoopLimits


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant turn: the parsed message, and why generation ended."""

    message: AssistantMessage
    finish_reason: FinishReason

    @property
    def stopped(self) -> bool:
        """The policy ended its turn itself."""
        return self.finish_reason.kind == "stop"


class AgentLoop(ABC):
    """Subclass it and `register("name")` it. One object serves all trajectories: keep state in local variables."""

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        """The messages, and those of the run's tools that the chat template renders, of which the first prompt is made.

        What data.max_prompt_length measures and the start-up check shows.
        """
        return sample.prompt, tools

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """Drive one trajectory to its end and set `episode.trajectory.status`.

        An exception other than CancelledError ends this try as an infrastructure fault. The scheduler tries again,
        unless it is a UserError or RequestError, which would only come again.
        """


@dataclass(slots=True)
class Episode:
    """One try at one trajectory: the loop's only way to the engine and to the record."""

    context: LoopContext
    sample: Sample
    trajectory: Trajectory
    params: SamplingParams
    """Temperature, top-p and top-k; lengths and stop ids are filled in for each turn."""
    seed: int
    session: str
    """The engine's name for this try."""
    waiting_for: str = "start"
    """What the episode is doing now; a time-out quotes it."""
    tools: Sequence[ToolSchema] | None = None
    assistant_turns: int = 0
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    messages_of_transcript: int = 0
    """Where in trajectory.messages the current transcript begins."""
    inside_turn: bool = False
    """Text was observed inside an assistant turn, so no template could render the transcript."""

    @property
    def transcript(self) -> Transcript:
        return self.trajectory.transcripts[-1]

    @property
    def budget_left(self) -> int:
        """Tokens that may still be appended, sampled or observed."""
        limits, transcript = self.context.limits, self.transcript
        return min(limits.max_response_tokens - transcript.response_length, limits.max_model_len - len(transcript))

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> None:
        """Open a transcript with the first prompt. `tools` are rendered by the chat template, now and on every turn."""
        self.tools = tools or None
        ids = self.context.chat.render(messages, self.tools)
        transcript = Transcript()
        transcript.append_prompt(ids)
        self.trajectory.transcripts.append(transcript)
        self.messages_of_transcript = len(self.trajectory.messages)
        self.trajectory.messages.extend(messages)

    async def generate(self, *, stop: Sequence[str] = ()) -> Reply:
        """One assistant turn: sampled, recorded as it is, parsed. Needs `budget_left` > 0."""
        start, before = len(self.transcript), self.generate_seconds
        generation = await self._sample(stop)
        chat, transcript = self.context.chat, self.transcript
        message = chat.parse(generation.ids, self.tools)
        turn = Turn(
            role="assistant",
            text=message.text,
            transcript=len(self.trajectory.transcripts) - 1,
            start=start,
            end=len(transcript),
            finish_reason=generation.finish_reason.kind,
            seconds=self.generate_seconds - before,
        )
        self.trajectory.turns.append(turn)
        self.assistant_turns += 1
        self.trajectory.messages.append(message.to_message())
        return Reply(message, generation.finish_reason)

    async def _sample(self, stop: Sequence[str]) -> Generation:
        limits, transcript = self.context.limits, self.transcript
        room = min(self.budget_left, limits.max_tokens_per_turn or self.budget_left)
        params = SamplingParams(
            max_new_tokens=room,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            top_k=self.params.top_k,
            stop_token_ids=self.context.chat.stop_token_ids,
            stop=tuple(stop),
            seed=seed_of(self.seed, len(transcript)),
        )
        self.waiting_for = f"the engine (turn {self.assistant_turns + 1}, {len(transcript)} tokens)"
        begun = time.monotonic()
        generation = await self.context.engine.generate(transcript.ids, params, self.session)
        self.generate_seconds += time.monotonic() - begun
        self.cached_tokens += generation.cached_tokens
        self.prompt_tokens += len(transcript)
        transcript.append_sampled(generation.ids, generation.logprobs, generation.versions)
        return generation

    def observe(self, messages: Sequence[Message]) -> bool:
        """Append tool answers or user turns and a new generation prompt. Returns whether there is room to go on.

        What does not fit the budget is cut, with a visible marker, and kept.
        """
        ids = self.context.chat.bridge(self.transcript.ids, messages, self.tools)
        self.trajectory.messages.extend(messages)
        text = "\n".join(str(message["content"]) for message in messages)
        return self._append_observed(ids, str(messages[0]["role"]), text)

    def observe_text(self, text: str) -> bool:
        """Append plain text inside the running assistant turn (ReAct's observations)."""
        self.inside_turn = True
        self.trajectory.messages.append({"role": "tool", "content": text})
        return self._append_observed(self.context.chat.encode(text), "tool", text)

    def _append_observed(self, ids: list[int], role: str, text: str) -> bool:
        left = self.budget_left
        if len(ids) > left:
            marker = self.context.chat.encode(CUT_MARKER)[: max(left, 0)]
            ids = ids[: max(left, 0) - len(marker)] + marker
            text += CUT_MARKER
        start = len(self.transcript)
        self.transcript.append_observed(ids)
        index = len(self.trajectory.transcripts) - 1
        self.trajectory.turns.append(
            Turn(role=role, text=text, transcript=index, start=start, end=len(self.transcript))
        )
        return self.budget_left > 0

    def count_drift(self) -> None:
        """Compare the last transcript with a full re-render of its messages, as a metric."""
        if self.inside_turn:
            return
        messages = self.trajectory.messages[self.messages_of_transcript :]
        drift = self.context.chat.drift(self.transcript.ids, messages, self.tools)
        for kind in Drift:
            self.trajectory.metrics[f"drift/{kind.value}"] = float(kind is drift)

    def finish(self, status: Status) -> None:
        """Set how the trajectory ended and the numbers it cost."""
        self.trajectory.status = status
        self.trajectory.metrics.update(
            generate_seconds=self.generate_seconds,
            tool_seconds=self.tool_seconds,
            cached_tokens=float(self.cached_tokens),
            context_tokens=float(self.prompt_tokens),
        )
