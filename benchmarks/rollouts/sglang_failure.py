"""A rollout step over four SGLang servers of which one is killed in the middle, or is ten times slower.

    python -m benchmarks.rollouts.sglang_failure

96 dialogues in groups of 8, each of 3 turns, through the scheduler, the engine and its fleet; the same seeds in every
round, so that the tokens can be compared with those of the undisturbed rounds. The servers' steps take 50 ms, see
`paced_launch`, and each runs 16 requests at once: with one server less, the rest of the step takes at least 4/3 of the
time. The engine starts a killed server again after the step, and the next round waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

from agentrl.chat import Chat
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.system.http import allow_many_files
from agentrl.trajectory import Status, Trajectory
from benchmarks.no_options import no_options
from benchmarks.rollouts.paced_launch import PACE
from benchmarks.rollouts.sglang_work import MODEL_LENGTH, STARTUP, Shape, engine_over, policy, scheduler

SERVERS = 4
AT_ONCE = 16
STEP = 0.05  # seconds
SLOWER = 10
SHAPE = Shape(dialogues=96, turns=3, fewest=32, most=64)
ROUNDS = 3
WHEN = 0.4
"""The part of an undisturbed step after which a server is lost."""
AFTER_THE_STEP = 45.0
"""Seconds from a server's death to its restart: more than a step, for launching one takes the cores from the others."""


class PacedServer(SGLangProcess):
    """One whose steps take their time."""

    module = "benchmarks.rollouts.paced_launch"

    def pace(self, seconds: float) -> None:
        """Set the seconds of a step, from now on."""
        file = Path(os.environ[PACE]) / str(self._port)
        (new := file.with_suffix(".new")).write_text(str(seconds))
        new.replace(file)

    def start(self) -> None:
        super().start()
        self.pace(STEP)


@dataclass(slots=True)
class Round:
    """One step."""

    seconds: float
    answers: list[list[list[int]]]
    """Sampled ids by dialogue and turn."""
    failovers: int
    lost: int
    """Trajectories without a full record."""


class Fleet:
    """The servers, and an engine over them."""

    def __init__(self, folder: Path, chat: Chat, shape: Shape) -> None:
        arguments = SGLangArguments(str(folder), device="cpu", context_length=MODEL_LENGTH, max_num_seqs=AT_ONCE)
        self.servers = [PacedServer(arguments, None, folder.parent / f"{n}.log") for n in range(SERVERS)]
        self.folder, self.chat, self.shape = folder, chat, shape
        self.told: list[str] = []
        self._round = 0
        self.engine: SGLangEngine

    async def start(self) -> None:
        for server in self.servers:
            server.start()
        await asyncio.gather(*[server.ready(STARTUP) for server in self.servers])
        timings = Timings(backoff=AFTER_THE_STEP, start_timeout=STARTUP, restart_window=1.0)
        self.engine = engine_over(self.servers, self.folder, timings=timings, notify=self.told.append)

    async def step(self, disturbance: Awaitable[None] | None = None) -> Round:
        """All dialogues, once all servers serve."""
        while (await self.engine.health()).metrics["servers_healthy"] < SERVERS:
            await asyncio.sleep(0.2)
        await self.engine.flush_cache()
        before = (await self.engine.health()).metrics["failovers"]
        self._round += 1
        began = time.perf_counter()
        disturbing = asyncio.ensure_future(disturbance) if disturbance is not None else None
        trajectories = await scheduler(self.engine, self.chat, self.shape).run(self.shape.requests(str(self._round)))
        seconds = time.perf_counter() - began
        if disturbing is not None:
            await disturbing
        return Round(
            seconds,
            [answers(trajectory) for trajectory in trajectories],
            round((await self.engine.health()).metrics["failovers"] - before),
            sum(not self._whole(number, trajectory) for number, trajectory in enumerate(trajectories)),
        )

    def _whole(self, number: int, trajectory: Trajectory) -> bool:
        lengths = [self.shape.length(number, turn) for turn in range(self.shape.turns)]
        return trajectory.status is Status.COMPLETED and list(map(len, answers(trajectory))) == lengths

    async def kill(self, after: float) -> None:
        """One server, `after` seconds from now."""
        await asyncio.sleep(after)
        pid = self.servers[1].pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)

    async def stop(self) -> None:
        await self.engine.close()
        for server in self.servers:
            server.stop()


def answers(trajectory: Trajectory) -> list[list[int]]:
    ids = trajectory.transcripts[0].ids
    return [ids[turn.start : turn.end] for turn in trajectory.turns if turn.finish_reason]


async def measure(folder: Path, shape: Shape = SHAPE, rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Measure steps by what happens in them; times of the same round, medians over rounds."""
    fleet = Fleet(folder, policy(folder), shape)
    found: dict[str, list[tuple[Round, Round]]] = {"undisturbed": [], "killed": [], "slow": []}
    try:
        await fleet.start()
        first = await fleet.step()
        for _ in range(rounds):
            plain = await fleet.step()
            found["undisturbed"].append((plain, first))
            fleet.servers[2].pace(STEP * SLOWER)
            found["slow"].append((await fleet.step(), plain))
            fleet.servers[2].pace(STEP)
            found["killed"].append((await fleet.step(fleet.kill(WHEN * plain.seconds)), plain))
            print(*fleet.told, sep="\n", file=sys.stderr)
            fleet.told.clear()
    finally:
        await fleet.stop()
    return {name: summary([one for one, _ in pairs], [base for _, base in pairs]) for name, pairs in found.items()}


def summary(rounds: list[Round], bases: list[Round]) -> dict[str, float]:
    over = [one.seconds / base.seconds for one, base in zip(rounds, bases, strict=True)]
    same = [
        mine == theirs
        for one, base in zip(rounds, bases, strict=True)
        for mine, theirs in zip(one.answers, base.answers, strict=True)
    ]
    return {
        "seconds": round(statistics.median(one.seconds for one in rounds), 2),
        "over_undisturbed": round(statistics.median(over), 3),
        "most_over_undisturbed": round(max(over), 3),
        "requests_that_failed_over": statistics.median(one.failovers for one in rounds),
        "trajectories_lost": sum(one.lost for one in rounds),
        "trajectories_with_other_tokens": same.count(False),
        "trajectories": len(same),
    }


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ[PACE] = name
        for what, figures in (await measure(Path(name) / "policy")).items():
            print(what, json.dumps(figures))


if __name__ == "__main__":
    no_options(__doc__)
    allow_many_files()
    asyncio.run(main())
