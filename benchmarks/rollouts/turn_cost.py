"""Cost of one more turn as the transcript grows from 1k to 32k tokens; each turn brings the same number of new ones.

    python -m benchmarks.rollouts.turn_cost

Two parts are measured apart, each turn in CPU milliseconds, on one thread:
- the runtime (parse, bridge, the record) through the real episode, with an engine that answers at once;
- the embedded engine with a tiny policy, several dialogues at once. Its cost has a part for the new tokens, and one for
  attention, which has to read all keys and values once for every token it samples, in whatever engine. The second is
  found as the slope of the cost against the length, and given with the memory traffic that it amounts to.
For comparison: the same turn when nothing is cached, so that the whole transcript is computed again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch

from agentrl.agent_loop import LoopContext, LoopLimits
from agentrl.agent_loop.base import Episode
from agentrl.chat import Chat
from agentrl.config import Config
from agentrl.engines.contract import FinishReason, Generation, SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import Weights
from agentrl.model.packed import load_model
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Message, PlacedImage, Trajectory, VersionSpan
from agentrl.trajectory.sample import Sample
from benchmarks.no_options import no_options

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
ROOM = 40960
SHAPE = TinyShape(max_length=ROOM)
DIALOGUES = 2
OBSERVED, SAMPLED = 24, 16
"""New tokens a turn, in the engine's part."""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call><|im_end|>'


class InstantEngine:
    """Says the same tool call every time, taking no time."""

    def __init__(self, chat: Chat) -> None:
        self.ids = chat.tokenizer.encode(CALL, add_special_tokens=False)

    async def generate(
        self, ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        count = len(self.ids)
        stop = FinishReason("stop", self.ids[-1])
        return Generation(list(self.ids), [-0.5] * count, stop, [VersionSpan(0, 0, count)])


async def cpu_ms(turn: Callable[[], Awaitable[None]], repeats: int) -> float:
    costs = []
    for _ in range(repeats):
        begun = time.process_time()
        await turn()
        costs.append(time.process_time() - begun)
    return statistics.median(costs) * 1e3


async def runtime_costs(chat: Chat) -> list[float]:
    """CPU ms of a turn at each of LENGTHS."""
    limits = dataclasses.replace(LoopLimits.from_config(Config()), max_response_tokens=ROOM, max_model_len=ROOM)
    tools = ToolSet.from_tools([], timeout=30, max_response_tokens=1024, truncate_side="middle")
    context = LoopContext(InstantEngine(chat), chat, tools, {}, limits)  # type: ignore[arg-type]
    prompt: list[Message] = [{"role": "user", "content": "What is 17 + 25?"}]
    episode = Episode(context, Sample(prompt, "turn_cost", "tool_agent"), Trajectory("t", 0), SamplingParams(1), 1, "t")
    await episode.start(prompt)

    async def turn() -> None:
        reply = await episode.generate()
        await episode.observe([{"role": "tool", "content": "42", "tool_call_id": reply.message.calls[0].id}])

    filler = "word " * 200
    costs = []
    for length in LENGTHS:
        while len(episode.transcript) < length:
            await episode.generate()
            await episode.observe([{"role": "tool", "content": filler, "tool_call_id": "filler"}])
        costs.append(await cpu_ms(turn, 50))
    return costs


async def engine_costs(policy: Path) -> tuple[list[float], list[float]]:
    """CPU ms of a turn of one dialogue at each of LENGTHS: with its cache, and with all of it computed again."""
    engine = EmbeddedEngine(load_model(str(policy)), max_num_seqs=DIALOGUES, max_model_len=ROOM)
    words = torch.Generator().manual_seed(0)
    dialogues = [sample_words(words, 64) for _ in range(DIALOGUES)]
    params = SamplingParams(SAMPLED, seed=1)

    async def grow(index: int, observed: int) -> None:
        dialogues[index] += sample_words(words, observed)
        generation = await engine.generate(dialogues[index], params, f"d{index}")
        dialogues[index] += generation.ids

    async def turn() -> None:
        await asyncio.gather(*[grow(index, OBSERVED) for index in range(DIALOGUES)])

    async def turn_without_cache() -> None:
        await engine.update_weights(Weights.from_tensors([]), 0)
        await turn()

    cached, anew = [], []
    for length in LENGTHS:
        while len(dialogues[0]) < length:
            missing = length - len(dialogues[0])
            await asyncio.gather(*[grow(index, max(1, min(4096, missing) - SAMPLED)) for index in range(DIALOGUES)])
        await turn()
        cached.append(await cpu_ms(turn, 5) / DIALOGUES)
        anew.append(await cpu_ms(turn_without_cache, 1) / DIALOGUES)
    return cached, anew


def sample_words(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(7, 250, (count,), generator=generator).tolist()


def measure() -> dict[str, object]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        policy = make_tiny_policy(Path(folder), seed=1, shape=SHAPE)
        gc.collect()
        gc.freeze()  # or one full collection now and then would be most of a runtime turn
        runtime = asyncio.run(runtime_costs(Chat.from_pretrained(folder)))
        cached, anew = asyncio.run(engine_costs(policy))
    slope = statistics.linear_regression(LENGTHS, cached).slope
    read = SAMPLED * 2 * SHAPE.layers * SHAPE.kv_heads * 32 * 4  # bytes a token of transcript in a turn
    return {
        "tokens": list(LENGTHS),
        "runtime_ms": [round(cost, 3) for cost in runtime],
        "engine_ms": [round(cost, 2) for cost in cached],
        "engine_without_cache_ms": [round(cost, 1) for cost in anew],
        "runtime_32k_over_1k": round(runtime[-1] / runtime[0], 2),
        "engine_32k_over_1k": round(cached[-1] / cached[0], 2),
        "without_cache_32k_over_1k": round(anew[-1] / anew[0], 2),
        "engine_ms_for_new_tokens": round(cached[0] - slope * LENGTHS[0], 2),
        "engine_ms_for_reading_32k_keys_and_values": round(slope * LENGTHS[-1], 2),
        "reading_gb_per_s": round(read / slope / 1e6, 1),
    }


if __name__ == "__main__":
    no_options(__doc__)
    print(json.dumps(measure(), indent=1))
