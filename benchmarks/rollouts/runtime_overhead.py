"""Cost of the runtime for one trajectory of four turns, when neither the model nor the tool takes any time.

    python -m benchmarks.rollouts.runtime_overhead

256 trajectories at once: rendering, bridging, parsing, validation, the tool call, the record, scoring. The engine is
scripted (it says three calls and an answer) and answers at once. Prints milliseconds of wall and CPU a trajectory, and
the ratio to verl 0.9.1's 8.2 ms (published figure for the same work on two cores; 11.2 ms at its slowest).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.agent_loop import LoopContext, LoopLimits, Request, Scheduler
from agentrl.agent_loop.registry import instantiate
from agentrl.chat import Chat
from agentrl.config import Config
from agentrl.engines.contract import FinishReason, Generation, SamplingParams
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.reward import NaiveRewardManager
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import PlacedImage, Status, VersionSpan
from agentrl.trajectory.sample import Sample
from benchmarks.no_options import no_options

VERL_MS = 8.2
TRAJECTORIES = 256
GROUP = 8


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class InstantEngine:
    """Says three tool calls and then an answer, taking no time: the policy of this benchmark, not a model."""

    def __init__(self, chat: Chat) -> None:
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call><|im_end|>'
        self.turns = [
            chat.tokenizer.encode(text, add_special_tokens=False) for text in [call] * 3 + ["#### 42<|im_end|>"]
        ]
        self.turn: dict[str, int] = {}

    async def generate(
        self, ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        turn = self.turn.get(session, 0)
        self.turn[session] = turn + 1
        out = self.turns[turn]
        await asyncio.sleep(0)
        return Generation(list(out), [-0.5] * len(out), FinishReason("stop", out[-1]), [VersionSpan(0, 0, len(out))])

    async def release(self, session: str) -> None:
        self.turn.pop(session, None)


def build(chat: Chat, engine: Any, tools: list[Any], max_concurrent: int = 1024) -> Scheduler:
    toolset = ToolSet.from_tools(tools, timeout=30, max_response_tokens=1024, truncate_side="middle")
    toolset.bind(chat.encode, chat.decode)
    return Scheduler(
        context=LoopContext(engine, chat, toolset, {}, LoopLimits.from_config(Config())),
        loops=instantiate(["tool_agent"]),
        reward=NaiveRewardManager(),
        max_concurrent=max_concurrent,
        trajectory_timeout=600,
        max_retries=0,
    )


def requests(n: int) -> list[Request]:
    return [
        Request(
            uid=f"{round(time.monotonic() * 1e6)}/{index}",
            group=index // GROUP,
            sample=Sample(
                prompt=[
                    {
                        "role": "user",
                        "content": f"What is 17 + 25? Row {index // GROUP}. Use the tool. Answer after ####.",
                    }
                ],
                data_source="quickstart/arithmetic",
                agent_name="tool_agent",
                ground_truth="42",
            ),
            params=SamplingParams(1),
            seed=index,
        )
        for index in range(n)
    ]


def measure(rounds: int = 15) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_policy(Path(folder), seed=1)
        chat = Chat.from_pretrained(folder)
    scheduler = build(chat, InstantEngine(chat), [add])
    walls, cpus = [], []

    async def run_once() -> None:
        # Inside the loop: `asyncio.run` writes out the repr of what its coroutine returns, here megabytes of records.
        work = requests(TRAJECTORIES)
        wall, cpu = time.perf_counter(), time.process_time()
        trajectories = await scheduler.run(work)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        assert all(t.status is Status.COMPLETED and t.score == 1.0 and len(t.tool_calls) == 3 for t in trajectories)

    for _ in range(rounds):
        asyncio.run(run_once())
    wall_ms, cpu_ms = (statistics.median(values[1:]) / TRAJECTORIES * 1e3 for values in (walls, cpus))
    return {"wall_ms": wall_ms, "cpu_ms": cpu_ms, "times_faster_than_verl": VERL_MS / cpu_ms}


if __name__ == "__main__":
    no_options(__doc__)
    print(json.dumps({name: round(value, 3) for name, value in measure().items()}))
