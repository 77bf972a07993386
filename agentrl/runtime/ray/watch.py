"""Watches a call on ranks under Ray: says which of them have not answered and where each is, and when it is enough."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray.exceptions import ObjectLostError, RayActorError

from agentrl.errors import WorkerDied
from agentrl.runtime.stall import Position, Stall, report

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from agentrl.runtime.ray.rank import Place, Rank

logger = logging.getLogger(__name__)
GONE = (RayActorError, ObjectLostError)
"""Exceptions that Ray raises in place of an answer when the process is dead, or the machine on which the answer lay."""
SAYS_WITHIN = 5.0
"""Seconds that a rank has to say where it is."""


class CallWatch:
    """One call, `what`, which begins now, on `actors`; `places`: where their processes are, as far as it is known."""

    def __init__(self, what: str, actors: Sequence[ActorProxy[Rank]], places: Sequence[Place], stall: Stall) -> None:
        self._what, self._actors, self._places, self.stall = what, actors, places, stall

    def look(self, waiting: Sequence[int]) -> None:
        """Say where the ranks `waiting` are, if it is time to. Raises WorkerDied when they have had their time."""
        if not (self.stall.due() or self.stall.over):
            return
        positions, silent = self._ask(waiting)
        answered = [rank for rank in range(len(self._actors)) if rank not in waiting]
        told = f"{self._what} has taken {self.stall.seconds:.0f} s: {report(positions, silent, answered)}"
        if self.stall.over:
            raise WorkerDied(f"{told}. They had {self.stall.limit:g} s")
        logger.warning("%s", told)

    def _ask(self, ranks: Sequence[int]) -> tuple[dict[int, Position], dict[int, str]]:
        """Ask ranks where they are. Returns positions, and the known state of ranks that do not answer in time."""
        asked = {rank: self._actors[rank].where.remote() for rank in ranks}
        said, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=SAYS_WITHIN)
        positions: dict[int, Position] = {}
        silent: dict[int, str] = {}
        for rank, call in asked.items():
            position: Position | None = None
            why = "it is stopped, unreachable, or in native code that lets no other thread run"
            if call in said:
                try:
                    position = ray.get(call)
                    why = "it has not begun"
                except GONE:
                    why = "it is dead"
            if position is not None:
                positions[rank] = position
                continue
            place = self._places[rank] if rank < len(self._places) else None
            silent[rank] = f"process {place.pid} on {place.host}: {why}" if place is not None else why
        return positions, silent
