"""The embedded engine against servers on the CPU: tokens a CPU-second of the same requests, on a real model.

    python -m benchmarks.real.server --model FOLDER [--cases 64x48 8x128] [--vllm PYTHON]

It runs in an environment that has SGLang; PYTHON is the interpreter of another one that has vLLM. Each engine samples
the same number of tokens at temperature 1 for the same prompts, in turn, on one thread and in float32. A server's
CPU-seconds are those of its processes and of the client, from an empty prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.engines.contract import RolloutEngine
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.model.packed import load_model
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.system.http import http_client
from benchmarks.real.engine import Ids, made_prompts, options_of, read_options, sample
from benchmarks.rollouts.sglang_throughput import cpu_of, empty_cache, serving
from benchmarks.rollouts.sglang_work import MODEL_LENGTH, STARTUP, engine_over


async def embedded(model: PreTrainedModel, prompts: Ids, tokens: int) -> float:
    """CPU-seconds of the embedded engine."""
    engine = EmbeddedEngine(model, max_num_seqs=len(prompts), max_model_len=len(prompts[0]) + tokens)
    return await cpu_seconds(engine, prompts, tokens)


@dataclass(frozen=True, slots=True)
class Served:
    """One server, and the client that asks it."""

    process: ServerProcess
    engine: Callable[[], Awaitable[RolloutEngine]]
    """Makes an engine over the server, whose prefix cache is empty."""

    async def seconds(self, prompts: Ids, tokens: int) -> float:
        """CPU-seconds of the server and its client."""
        assert self.process.pid is not None
        engine = await self.engine()
        before = cpu_of(self.process.pid)
        client = await cpu_seconds(engine, prompts, tokens)
        return client + cpu_of(self.process.pid) - before


class Elsewhere(VLLMProcess):
    """A vLLM server of another environment."""

    python = ""
    """Its interpreter."""

    def command(self, port: int) -> list[str]:
        return [self.python, *super().command(port)[1:]]


async def over_sglang(url: str, folder: Path) -> RolloutEngine:
    await empty_cache(url)
    return engine_over([url], folder)


async def over_vllm(process: VLLMProcess, folder: Path) -> RolloutEngine:
    http = http_client()
    client = VLLMClient(process.url, http, process.key)
    await client.info()
    assert await client.flush_cache(wait=5)
    sender = TensorSender(torch.float32, 1 << 20)
    facts = ModelFacts.from_path(str(folder))
    return VLLMEngine([Server(client)], http, facts, sender, max_model_len=MODEL_LENGTH, deterministic=True)


@asynccontextmanager
async def serving_vllm(python: str, folder: Path, logs: Path) -> AsyncIterator[Served]:
    arguments = VLLMArguments(str(folder), "cpu", "float32", context_length=MODEL_LENGTH, max_num_seqs=64)
    process = Elsewhere(arguments, None, logs / "vllm.log", key="secret")
    process.python = python
    try:
        process.start()
        await process.ready(STARTUP)
        yield Served(process, partial(over_vllm, process, folder))
    finally:
        process.stop()


async def cpu_seconds(engine: RolloutEngine, prompts: Ids, tokens: int) -> float:
    began = time.process_time()
    await sample(engine, prompts, tokens)
    spent = time.process_time() - began
    await engine.close()
    return spent


async def compare(
    model: PreTrainedModel, servers: Mapping[str, Served], prompts: Ids, tokens: int, rounds: int
) -> None:
    """Print tokens a CPU-second of each engine, and ratios to the embedded one: medians over rounds."""
    ways: dict[str, Callable[[], Awaitable[float]]] = {"embedded": partial(embedded, model, prompts, tokens)}
    ways |= {name: partial(server.seconds, prompts, tokens) for name, server in servers.items()}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            spent[name].append(await way())
    count = len(prompts)
    each = ", ".join(f"{name} {count * tokens / statistics.median(found):.1f}" for name, found in spent.items())
    ratios = {name: statistics.median(map(operator.truediv, spent[name], spent["embedded"])) for name in servers}
    over = ", ".join(f"embedded over {name}: {ratio:.2f}" for name, ratio in ratios.items())
    print(f"{count} x {tokens}, tokens a CPU-second: {each}; {over}", flush=True)


async def work(asked: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(make_tiny_policy(f"{place}/policy", 0) if asked.tiny else asked.model).absolute()
        model = load_model(str(folder))
        sglang = await stack.enter_async_context(serving(folder, Path(place)))
        servers = {"SGLang": Served(sglang, partial(over_sglang, sglang.url, folder))}
        if asked.vllm is not None:
            servers["vLLM"] = await stack.enter_async_context(serving_vllm(asked.vllm, folder, Path(place)))
        for case in ["8x6"] if asked.tiny else asked.cases:
            count, tokens = map(int, case.split("x"))
            prompts = made_prompts(model, count, asked.group, 16 if asked.tiny else asked.prompt)
            for server in servers.values():
                await server.seconds(prompts, 1)  # a first request makes what later ones use
            await compare(model, servers, prompts, tokens, asked.rounds)


def main(words: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--vllm", help="interpreter of an environment that has vLLM")
    asked = read_options(parser, words)
    torch.set_num_threads(1)
    asyncio.run(work(asked))


if __name__ == "__main__":
    main()
