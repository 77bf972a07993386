"""Writes an answer as the events of a stream, in pieces as they come; a whole answer is one piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from agentrl.chat.message import content_text
from agentrl.openai_api.completion import Begun, Completion

PIECE = 64
"""Characters of text in one event of a stream."""


class EventWriter(ABC):
    """One answer as events. A dialect says what each of its parts looks like."""

    def __init__(self, begun: Begun) -> None:
        self.begun = begun
        self._is_open = False
        self._thought = self._said = 0

    def more(self, reasoning: str, text: str) -> Iterator[bytes]:
        """Write more of the answer. All of its reasoning comes before its text."""
        yield from self._opened(self.begun)
        for piece in pieces(reasoning):
            yield from self.reason(piece)
        for piece in pieces(text):
            yield from self.say(piece)
        self._thought += len(reasoning)
        self._said += len(text)

    def end(self, completion: Completion) -> Iterator[bytes]:
        """Write all of the answer that was not written yet, and its end."""
        yield from self._opened(completion)
        message = completion.message
        reasoning, text = message.get("reasoning_content") or "", content_text(message["content"])
        yield from self.more(reasoning[self._thought :], text[self._said :])
        yield from self.close(completion)

    def _opened(self, begun: Begun) -> Iterator[bytes]:
        if not self._is_open:
            self._is_open = True
            yield from self.open(begun)

    @abstractmethod
    def open(self, begun: Begun) -> Iterator[bytes]:
        """Write the begin; a Completion where all of the answer is known."""

    @abstractmethod
    def reason(self, piece: str) -> Iterator[bytes]:
        """Write a piece of reasoning."""

    @abstractmethod
    def say(self, piece: str) -> Iterator[bytes]:
        """Write a piece of text."""

    @abstractmethod
    def close(self, completion: Completion) -> Iterator[bytes]:
        """Write the calls, and the end."""


def pieces(text: str) -> Iterator[str]:
    """Cut text into the pieces of a stream."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]
