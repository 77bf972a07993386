"""Compaction: a conversation that becomes too long continues from a summary that the policy writes of it.

When a transcript has more than a share of its window, or no room is left, the policy is asked for a summary. A new
transcript then begins with the first prompt, the summary after its last message, and the last turns as they were. A
turn whose answer did not fit is among them, with all of its answer. The old transcript stays as it was sampled, with
the request and the summary at its end. In every window, the tokens of the request and of a summary stay free for them.

A summary fails if it is empty, has calls, is cut at its limit, or does not fit into the new window. The trajectory then
ends with the status `length`, as it would without compaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentrl.agent_loop.base import Episode
from agentrl.agent_loop.compaction import Compaction
from agentrl.trajectory import Message
from agentrl.trajectory.picture import joined

HEADING = "\n\nSummary of the work so far:\n"
"""Text between the task and the summary."""
COUNTS = ("compactions", "compaction_failed")
"""Metrics of a trajectory: summaries that were asked for, and those that ended it."""

Observe = Callable[[Sequence[Message]], Awaitable[bool]]
"""See `Episode.observe`."""


def compactor_of(episode: Episode) -> Compactor | None:
    """Make the compactor of a trajectory whose first transcript has just been opened; None without compaction."""
    rules = episode.context.compaction
    return None if rules is None else Compactor(episode, rules)


def observing(episode: Episode) -> Observe:
    """Return the function that appends messages for the policy: `Episode.observe`, or the compactor's."""
    compactor = compactor_of(episode)
    return episode.observe if compactor is None else compactor.observe


@dataclass(slots=True)
class Compactor:
    """Compaction of one trajectory."""

    episode: Episode
    rules: Compaction
    opening: list[Message] = field(init=False)
    """The first prompt."""
    reserved: int = field(init=False)
    """Tokens that stay free for the request and the summary."""

    def __post_init__(self) -> None:
        episode = self.episode
        self.opening = list(episode.messages)
        self.reserved = episode.reserved = self.rules.reserved(episode.context.chat)
        for name in COUNTS:
            episode.trajectory.metrics.setdefault(name, 0.0)

    async def observe(self, messages: Sequence[Message]) -> bool:
        """Append messages as `Episode.observe` does, and compact where it is due. Returns whether there is room."""
        room = await self.episode.observe(messages)
        if not self._is_due(room):
            return True
        said = self.episode.messages[len(self.opening) :]
        starts = self._kept([at for at, one in enumerate(said) if one["role"] == "assistant"], room)
        summary = await self._summary()
        return summary is not None and await self._go_on(self._with_turns(summary, [said[at:] for at in starts]), [])

    async def after_text(self, room: bool) -> bool:
        """Compact where it is due, with the last turns as text within a turn of the policy; `room`: there is some.

        Returns whether there is room.
        """
        if not self._is_due(room):
            return True
        episode = self.episode
        end, chat = len(episode.transcript), episode.context.chat
        turns = [one for one in episode.trajectory.turns if one.transcript == episode.index]
        starts = self._kept([one.start for one in turns if one.role == "assistant"], room)
        end, said = (turns[-1].start, str(episode.messages[-1]["content"])) if not room else (end, "")
        texts = [chat.decode(episode.transcript.ids[begin:end]) + said for begin in starts]
        summary = await self._summary()
        return summary is not None and await self._go_on(self._with_summary(summary), texts)

    def _is_due(self, room: bool) -> bool:
        length = len(self.episode.transcript)
        return not room or length > self.rules.threshold * (length + self.episode.budget_left + self.reserved)

    async def _summary(self) -> str | None:
        """Ask for the summary; None where the answer cannot be one."""
        episode, rules = self.episode, self.rules
        episode.reserved = 0
        episode.trajectory.metrics["compactions"] += 1.0
        if await episode.observe([rules.asking()]):
            begin = len(episode.transcript)
            reply = await episode.generate(max_tokens=rules.max_summary_tokens)
            episode.assistant_turns -= 1  # It is no turn of the task's.
            if not rules.train_summary:
                episode.transcript.trained_to = begin
            text = reply.message.text.strip()
            if text and reply.stopped and not reply.forged and not reply.message.calls:
                return text
        episode.trajectory.metrics["compaction_failed"] += 1.0
        return None

    async def _go_on(self, prompt: list[Message], texts: Sequence[str]) -> bool:
        """Open the new transcript, with the first of the texts that fits; return whether there is room."""
        episode, chat = self.episode, self.episode.context.chat
        await episode.start(prompt, episode.tools)
        episode.reserved = self.reserved
        length = len(episode.transcript)
        for text in texts:
            if self._fits(length + len(chat.encode(text)), length):
                await episode.observe_text(text)
                break
        if episode.budget_left > 0:
            return True
        episode.trajectory.metrics["compaction_failed"] += 1.0
        return False

    def _with_turns(self, summary: str, ends: Sequence[Sequence[Message]]) -> list[Message]:
        """Return the prompt with the summary, and with the first of these ends of the conversation that fits."""
        episode, prompt = self.episode, self._with_summary(summary)
        for said in ends:
            whole = [*prompt, *said]
            ids = episode.context.chat.render(whole, episode.tools, sampled=episode.sampled_texts)
            if self._fits(len(ids), len(ids)):
                return whole
        return prompt

    def _kept(self, starts: Sequence[int], fits: bool) -> Sequence[int]:
        """Return the beginnings of the last turns, the most turns first; `fits`: the last answer was not cut."""
        number = self.rules.keep_turns if fits else max(self.rules.keep_turns, 1)
        return starts[-number:] if number else ()

    def _fits(self, tokens: int, prompt: int) -> bool:
        """Say whether a transcript of so many tokens, with this prompt, would not have to be compacted at once."""
        limits = self.episode.context.limits
        return tokens <= self.rules.threshold * min(limits.max_response_tokens + prompt, limits.max_model_len)

    def _with_summary(self, summary: str) -> list[Message]:
        """Return the first prompt with the summary after its last message."""
        last = self.opening[-1]
        if last["role"] != "user":
            return [*self.opening, {"role": "user", "content": (HEADING + summary).strip()}]
        # Many chat templates refuse two user turns in a row.
        return [*self.opening[:-1], {**last, "content": joined(last["content"], HEADING + summary)}]
