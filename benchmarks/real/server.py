"""The embedded engine against one SGLang server on the CPU: tokens a CPU-second of the same requests, on a real model.

    python -m benchmarks.real.server --model FOLDER [--cases 64x48 8x128]        in an environment that has SGLang

Each samples the same number of tokens at temperature 1 for the same prompts, in turn, on one thread and in float32. A
server's CPU-seconds are those of its processes and of the client, from an empty prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.engines.contract import RolloutEngine
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.model.packed import load_model
from agentrl.quickstart.tiny_policy import make_tiny_policy
from benchmarks.real.engine import Ids, made_prompts, read_options, sample
from benchmarks.rollouts.sglang_throughput import cpu_of, empty_cache, serving
from benchmarks.rollouts.sglang_work import engine_over


async def embedded(model: PreTrainedModel, prompts: Ids, tokens: int) -> float:
    """CPU-seconds of the embedded engine."""
    engine = EmbeddedEngine(model, max_num_seqs=len(prompts), max_model_len=len(prompts[0]) + tokens)
    return await cpu_seconds(engine, prompts, tokens)


async def served(server: SGLangProcess, prompts: Ids, tokens: int) -> float:
    """CPU-seconds of the server and its client."""
    assert server.pid is not None
    await empty_cache(server.url)
    before = cpu_of(server.pid)
    client = await cpu_seconds(engine_over([server.url], Path(server.arguments.model_path)), prompts, tokens)
    return client + cpu_of(server.pid) - before


async def cpu_seconds(engine: RolloutEngine, prompts: Ids, tokens: int) -> float:
    began = time.process_time()
    await sample(engine, prompts, tokens)
    return time.process_time() - began


async def compare(model: PreTrainedModel, server: SGLangProcess, prompts: Ids, tokens: int, rounds: int) -> None:
    """Print tokens a CPU-second of both, and their ratio: the median over rounds."""
    ways: Mapping[str, Callable[[], Awaitable[float]]] = {
        "engine": partial(embedded, model, prompts, tokens),
        "SGLang": partial(served, server, prompts, tokens),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            spent[name].append(await way())
    count = len(prompts)
    each = ", ".join(f"{name} {count * tokens / statistics.median(found):.1f}" for name, found in spent.items())
    ratio = statistics.median(map(operator.truediv, spent["SGLang"], spent["engine"]))
    print(f"{count} x {tokens}, tokens a CPU-second: {each}; engine over SGLang: {ratio:.2f}", flush=True)


async def work(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(make_tiny_policy(f"{place}/policy", 0) if asked.tiny else asked.model).absolute()
        model = load_model(str(folder))
        async with serving(folder, Path(place)) as server:
            for case in ["8x6"] if asked.tiny else asked.cases:
                count, tokens = map(int, case.split("x"))
                prompts = made_prompts(model, count, asked.group, 16 if asked.tiny else asked.prompt)
                await served(server, prompts, 1)  # a first request makes what later ones use
                await compare(model, server, prompts, tokens, asked.rounds)


def main(words: Sequence[str] | None = None) -> None:
    asked = read_options(__doc__, words)
    torch.set_num_threads(1)
    asyncio.run(work(asked))


if __name__ == "__main__":
    main()
