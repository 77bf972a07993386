"""Turns that engines end, written down a line each by the process that asked for them: rollout workers', too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from agentrl.agent_loop import Episode
from agentrl.agent_loop.single_turn import SingleTurnLoop
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import SamplingParams
from agentrl.engines.recorded import TimedGeneration, request_key
from agentrl.trajectory import PlacedImage

LEFT_ALONE = -1
"""Number of a training that ended by itself."""


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that an engine ended."""

    kill: int
    """Number of the kill that ended the training which had asked for it; or `LEFT_ALONE`."""
    at: float
    """Time, in seconds since the epoch."""
    uid: str
    """The trajectory."""
    key: str
    """Digest of what was asked for."""


def read_turns(file: Path) -> list[EndedTurn]:
    """Read the turns of a file, in the order in which they ended."""
    lines = (line.split() for line in file.read_text().splitlines())
    return [EndedTurn(int(kill), float(at), uid, key) for kill, at, uid, key in lines]


class NotingTurns(SingleTurnLoop):
    """Loop that no row asks for: where a training makes its loops, it has turns written to a file.

    Args:
        kill: see `EndedTurn`.
    """

    def __init__(self, file: Path, kill: int) -> None:
        self.file, self.kill = file.absolute(), kill

    def configure(self, config: RolloutsConfig) -> None:
        """Have turns written down in this process, once, below what a journal answers."""
        ask_engine, file, kill = Episode._ask_engine, self.file, self.kill
        if ask_engine.__module__ == __name__:
            return

        async def asked(
            episode: Episode, ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
        ) -> TimedGeneration:
            answer = await ask_engine(episode, ids, params, session, images)
            with file.open("a") as turns:
                print(kill, time.time(), episode.trajectory.uid, request_key(ids, params, images), file=turns)
            return answer

        patch.object(Episode, "_ask_engine", asked).start()
