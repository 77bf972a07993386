"""A request of the embedded engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from agentrl.engines.contract import Generation, Listener, SamplingParams
from agentrl.engines.embedded.cache import Session


@dataclass(slots=True, eq=False)
class Request:
    """One call of generate. Its sampled ids are the session's tokens from `start` on."""

    session: Session
    params: SamplingParams
    seed: int
    future: asyncio.Future[Generation]
    start: int
    stop_ids: frozenset[int]
    stop_window: int
    """Number of last tokens that can hold a stop string which the last one completes."""
    listener: Listener | None = None
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, first token that it sampled)"""
    cached_tokens: int = -1
    """Tokens of the prompt found in the cache; -1 before the request is first scheduled."""
    in_place: bool = False
    """True while it is paused with its keys and values kept, and has not continued yet."""

    @property
    def new_tokens(self) -> int:
        """Tokens of the session that have no keys and values yet."""
        return len(self.session.ids) - self.session.cached
