"""Marks that a template writes around the reasoning and the text of a turn, and that the call format does not know.

They are found as turn ends are: by having the template write made-up words, and looking at what stands around them
where the turn is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agentrl.chat.message import AssistantMessage
from agentrl.errors import ConfigError
from agentrl.trajectory import Message

SAID, THOUGHT = "AgentrlReply", "AgentrlThought"
PLAIN: Message = {"role": "assistant", "content": SAID}
REASONED: Message = {**PLAIN, "reasoning_content": THOUGHT}


@dataclass(frozen=True, slots=True)
class Frame:
    """Marks as they stand in a turn's text; empty without marks."""

    before: str = ""
    """Before the text of a turn without reasoning."""
    after: str = ""
    opens: str = ""
    """Before reasoning."""
    closes: str = ""
    """Between reasoning and text."""

    def strip(self, message: AssistantMessage) -> AssistantMessage:
        """Take the marks off a turn as the call format reads it, and the reasoning out of its text."""
        text, reasoning = message.text, message.reasoning
        if self.closes and reasoning is None:
            thought, closed, said = text.partition(self.closes)
            if closed and thought.lstrip().startswith(self.opens):
                reasoning = thought.strip().removeprefix(self.opens).strip() or None
                text = said.lstrip("\n")
        if self.before and text.lstrip().startswith(self.before):
            text = text.lstrip().removeprefix(self.before).lstrip("\n")
        if self.after and text.rstrip().endswith(self.after):
            text = text.rstrip().removesuffix(self.after).rstrip("\n")
        return replace(message, text=text, reasoning=reasoning)


def find_frame(read: Callable[[Message], AssistantMessage]) -> Frame | None:
    """Find the marks by `read`, which writes a turn and reads it again; None without marks."""
    plain, reasoned = _text(read, PLAIN), _text(read, REASONED)
    if not plain and THOUGHT not in reasoned:  # A turn always reasons, and its reasoning has been read.
        plain = reasoned
    before, said, after = plain.partition(SAID)
    opens, thought, rest = reasoned.partition(THOUGHT)
    closes, said_too, behind = rest.partition(SAID)
    marks = (before, after) if said else ("", behind if said_too else "")
    inside = (opens, closes) if thought and said_too and closes.strip() else ("", "")
    # A word is no mark without the blanks after it.
    frame = Frame(marks[0].lstrip(), *(mark.strip() for mark in (marks[1], *inside)))
    return None if frame == Frame() else frame


def unread(read: Callable[[Message], AssistantMessage]) -> str | None:
    """Return the text as which a turn is read that says SAID and thought THOUGHT, where that is not SAID."""
    for turn in (PLAIN, REASONED):
        if (text := _text(read, turn)) and text.strip() != SAID:
            return text
    return None


def _text(read: Callable[[Message], AssistantMessage], turn: Message) -> str:
    try:
        return read(turn).text
    except ConfigError:
        return ""  # Its generation prompt begins otherwise: with reasoning, or without.
