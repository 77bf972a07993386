"""128 trajectories whose tool takes 0.1 s: how much longer than one call does the tool phase take?

    python -m benchmarks.tools.tool_latency

Every trajectory makes one call; the same rollout with a tool that takes no time, in the same run, is subtracted.
Prints the ratio of the added seconds to one tool's latency (1.0 is perfect; one after another would be 128).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from agentrl.agent_loop import Scheduler
from agentrl.chat import Chat
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.trajectory import Status
from benchmarks.no_options import no_options
from benchmarks.rollouts.runtime_overhead import InstantEngine, build, requests

LATENCY = 0.1
TRAJECTORIES = 128


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Add two numbers, slowly."""
    await asyncio.sleep(LATENCY)
    return a + b


slow_add.__name__ = "add"


def one_call(chat: Chat) -> InstantEngine:
    engine = InstantEngine(chat)
    engine.turns = engine.turns[2:]
    return engine


def seconds(scheduler: Scheduler) -> float:
    work = requests(TRAJECTORIES)
    began = time.perf_counter()
    trajectories = asyncio.run(scheduler.run(work))
    assert all(t.status is Status.COMPLETED and t.score == 1.0 and len(t.tool_calls) == 1 for t in trajectories)
    return time.perf_counter() - began


def measure(rounds: int = 7) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_policy(Path(folder), seed=1)
        chat = Chat.from_pretrained(folder)
    added = []
    for _ in range(rounds):
        instant = seconds(build(chat, one_call(chat), [add]))
        added.append(seconds(build(chat, one_call(chat), [slow_add])) - instant)
    ratio = statistics.median(added) / LATENCY
    return {
        "added_seconds": statistics.median(added),
        "ratio_to_one_call": ratio,
        "one_after_another": float(TRAJECTORIES),
    }


if __name__ == "__main__":
    no_options(__doc__)
    print(json.dumps({name: round(value, 3) for name, value in measure().items()}))
