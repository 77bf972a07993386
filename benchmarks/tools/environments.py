"""Cost of a sidecar beyond its environment's own: `python -m benchmarks.tools.environments`.

Plays episodes of an environment that costs next to nothing, 256 at once, by the client that the loop uses. Prints the
wall time a step and the CPU time a trajectory, of client and sidecar together, and both as parts of what they may cost.
A step is also held against a request of the same run that asks the environment nothing. Exits with 1 when an episode
went wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.environments.sidecar import EnvironmentOptions, Play, Sidecar

MOST_STEP, MOST_TRAJECTORY = 0.005, 0.05
"""Most seconds by the clock of a step, and CPU-seconds of a trajectory, beyond the environment's own."""
ECHO = """
def tasks(split, seed, count):
    return ({"prompt": "?", "index": n} for n in range(count))

def start(task, seed):
    return {"steps": 0, "last": task["steps"]}, None

def step(episode, action):
    episode["steps"] += 1
    return {"observation": action["text"], "reward": 0.0, "done": episode["steps"] == episode["last"]}

def score(episode):
    return float(episode["steps"])
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs."""

    episodes: int
    steps: int
    wrong: int
    """Episodes with another score than their number of steps."""
    wall: float
    bare: float
    """Seconds by the clock of a request that asks the environment nothing, as many at once."""
    client_cpu: float
    sidecar_cpu: float

    def lines(self) -> list[str]:
        """Return the lines to print."""
        cpu = (self.client_cpu + self.sidecar_cpu) / self.episodes
        step = self.wall / (self.episodes * self.steps)
        return [
            f"{self.episodes} episodes of {self.steps} steps, {self.wrong} wrong, in {self.wall:.1f} s",
            f"a step: {1e3 * step:.2f} ms by the clock, {step / MOST_STEP:.2f} of what it may cost, "
            f"{step / self.bare:.1f} times a bare request; {1e3 * cpu / (self.steps + 3):.2f} ms of CPU a request",
            f"a trajectory: {cpu:.4f} CPU-seconds, {cpu / MOST_TRAJECTORY:.2f} of what it may cost, of which the "
            f"sidecar's are {self.sidecar_cpu / self.episodes:.4f}",
        ]


def cpu_of(process: int) -> float:
    """CPU-seconds that a process has used, without its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure(at_once: int, rounds: int, steps: int) -> Costs:
    """Play `rounds` times `at_once` episodes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "echo.py"
        file.write_text(ECHO)
        sidecar = Sidecar(EnvironmentOptions(environment=str(file)))
        try:
            address = await sidecar.ready()
            assert address.process is not None
            await asyncio.gather(*(_play(sidecar, 1) for _ in range(at_once)))  # connections
            begun = time.monotonic()
            await asyncio.gather(*(_bare(sidecar, steps) for _ in range(at_once)))
            bare = (time.monotonic() - begun) / (at_once * steps)
            begun, client, server = time.monotonic(), time.process_time(), cpu_of(address.process.pid)
            wrong = 0
            for _ in range(rounds):
                scores = await asyncio.gather(*(_play(sidecar, steps) for _ in range(at_once)))
                wrong += sum(score != steps for score in scores)
            wall, client = time.monotonic() - begun, time.process_time() - client
            return Costs(at_once * rounds, steps, wrong, wall, bare, client, cpu_of(address.process.pid) - server)
        finally:
            await sidecar.close()


async def _bare(sidecar: Sidecar, requests: int) -> None:
    address = await sidecar.ready()
    for _ in range(requests):
        await sidecar.ask(address, "environment", {})


async def _play(sidecar: Sidecar, steps: int) -> float:
    play = Play(sidecar, await sidecar.ready(), 60.0, "task")
    await play.start({"steps": steps}, 1)
    while not play.done:
        await play.step("x" * 200, ())
    score = (await play.score())["score"]
    await play.close()
    assert isinstance(score, float)
    return score


def main() -> int:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    costs = asyncio.run(measure(given.at_once, given.rounds, given.steps))
    print("\n".join(costs.lines()))
    return int(costs.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
