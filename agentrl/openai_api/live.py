"""An answer that is sent while it is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.chat import AssistantMessage
from agentrl.chat.formats.growing import GrowingTurn, Grown

AT_ONCE = 256
"""Tokens that are read for one piece of a stream: so many may wait unread at a client's system, unseen by this one."""


class Live:
    """Tokens of an answer from the engine to the stream of its client."""

    def __init__(self, turn: GrowingTurn, news: asyncio.Event) -> None:
        """`news` is set when tokens arrive."""
        self._turn, self._news = turn, news
        self._arrived: list[int] = []
        self._is_over = False

    def hear(self, ids: Sequence[int]) -> None:
        """Take tokens; the engine's listener."""
        self._arrived.extend(ids)
        self._news.set()

    def more(self) -> Grown | None:
        """Return the further part of the answer that is certain by now and was not returned before."""
        ids, self._arrived = self._arrived[:AT_ONCE], self._arrived[AT_ONCE:]
        if self._arrived:
            self._news.set()
        return None if self._is_over else self._turn.add(ids)

    def settled(self, ids: Sequence[int], message: AssistantMessage) -> AssistantMessage:
        """Return the whole answer, which continues the text that `more` returned; `more` then returns nothing."""
        self._is_over = True
        return self._turn.settled(ids, message)
