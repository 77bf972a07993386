"""Tokens a second through agentrl, over those of the same requests sent straight to the same SGLang server.

    python -m benchmarks.rollouts.sglang_throughput

A first round through agentrl is written down; then three ways take turns, each from an empty prefix cache:
agentrl (scheduler, episodes, engine, router), a bare aiohttp client that posts what was written down and reads the same
stream, and the same client without a stream. A dialogue's requests follow each other, dialogues run at once. Answers
that differ from the first round's are counted. Servers and clients share this machine's cores, so what the client burns
the server lacks.

Then: 1,000 requests in flight at one server, and what the deterministic mode (seeds) costs it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import operator
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import orjson

from agentrl.agent_loop.limits import seed_of
from agentrl.chat import Chat
from agentrl.engines.contract import Generation, SamplingParams
from agentrl.engines.servers.process import living
from agentrl.engines.sglang.client import SGLangClient, sampling_params
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.system.http import allow_many_files
from agentrl.trajectory import Status, Trajectory
from benchmarks.no_options import no_options
from benchmarks.rollouts.sglang_work import MODEL_LENGTH, STARTUP, Shape, engine_over, policy, scheduler

SINGLE = Shape(dialogues=64, turns=1, fewest=64, most=256)
SEVERAL = Shape(dialogues=64, turns=4, fewest=32, most=96)
CROWD = Shape(dialogues=1000, turns=1, fewest=32, most=64)
ROUNDS = 5

Body = dict[str, Any]
Script = list[list[Body]]
"""Requests that follow each other, by dialogue."""
Answers = list[list[list[int]]]
"""Sampled ids by dialogue and turn."""


@dataclass(slots=True)
class Cost:
    """Cost of one way of asking, over all its rounds."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU-seconds of this process, the client, by round."""
    all_cpu: list[float] = field(default_factory=list)
    """CPU-seconds of the client and the server's processes together, by round."""
    tokens: int = 0
    requests: int = 0
    different: int = 0
    """Answers that were not the first round's."""

    def report(self) -> dict[str, float]:
        seconds, cpu, all_cpu = map(statistics.median, (self.seconds, self.cpu, self.all_cpu))
        return {
            "tokens_per_second": round(self.tokens / seconds, 1),
            "tokens_per_cpu_second": round(self.tokens / all_cpu, 1),
            "client_cpu_ms_a_request": round(cpu / self.requests * 1e3, 3),
            "different_answers": self.different,
        }


class Recorder(SGLangClient):
    """Writes down what it is asked for, by the request's seed."""

    bodies: ClassVar[dict[int, Body]] = {}

    async def generate(self, rid: str, ids: Sequence[int], params: SamplingParams, **rest: Any) -> Generation:
        assert params.seed is not None and params.seed not in self.bodies
        sampling = sampling_params(params)
        self.bodies[params.seed] = {"input_ids": list(ids), "sampling_params": sampling, "extra_key": rest["cache_key"]}
        return await super().generate(rid, ids, params, **rest)


class Agentrl:
    """The requests of a shape through the whole of agentrl."""

    def __init__(self, url: str, folder: Path, chat: Chat, shape: Shape, **options: Any) -> None:
        self.shape = shape
        self.engine = engine_over([url], folder, **options)
        self.scheduler = scheduler(self.engine, chat, shape)
        self._round = 0

    async def run(self) -> Answers:
        return [
            [trajectory.transcripts[0].ids[turn.start : turn.end] for turn in trajectory.turns if turn.finish_reason]
            for trajectory in await self.trajectories()
        ]

    async def trajectories(self) -> list[Trajectory]:
        self._round += 1
        trajectories = await self.scheduler.run(self.shape.requests(str(self._round)))
        assert all(trajectory.status is Status.COMPLETED for trajectory in trajectories)
        return trajectories


async def empty_cache(url: str) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/flush_cache?timeout=5") as answer:
        assert answer.status == 200, "requests are still running"


async def script_of(url: str, folder: Path, chat: Chat, shape: Shape) -> Script:
    """Record the requests that agentrl sends for that shape, from an empty cache."""
    await empty_cache(url)
    Recorder.bodies.clear()
    agentrl = Agentrl(url, folder, chat, shape, client=Recorder)
    trajectories = await agentrl.trajectories()
    await agentrl.engine.close()
    return [
        [Recorder.bodies[seed_of(seed_of(number, 0), turn.start)] for turn in trajectory.turns if turn.finish_reason]
        for number, trajectory in enumerate(trajectories)
    ]


async def straight(url: str, script: Script, *, stream: bool) -> Answers:
    """The script posted by a client that does nothing else."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:

        async def post(body: Body) -> list[int]:
            content = orjson.dumps({**body, "return_logprob": True, "stream": stream})
            async with http.post(
                f"{url}/generate", data=content, headers={"content-type": "application/json"}
            ) as answer:
                if not stream:
                    return list(orjson.loads(await answer.read())["output_ids"])
                ids: list[int] = []
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        ids += orjson.loads(line[6:])["output_ids"]
                return ids

        async def dialogue(bodies: list[Body]) -> list[list[int]]:
            return [await post(body) for body in bodies]

        return list(await asyncio.gather(*[dialogue(bodies) for bodies in script]))


def cpu_of(group: int) -> float:
    """CPU-seconds that a server's living processes have burned."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in living(group))
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


async def in_turns(
    url: str, group: int, ways: Mapping[str, Callable[[], Awaitable[Answers]]], rounds: int
) -> dict[str, Cost]:
    """All ways in every round, each time in another order, each from an empty cache."""
    costs = {name: Cost() for name in ways}
    order = list(ways)
    first: list[list[int]] | None = None
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            await empty_cache(url)
            gc.collect()
            began, cpu, server = time.perf_counter(), time.process_time(), cpu_of(group)
            answers = await ways[name]()
            cost = costs[name]
            cost.seconds.append(time.perf_counter() - began)
            cost.cpu.append(time.process_time() - cpu)
            cost.all_cpu.append(cost.cpu[-1] + cpu_of(group) - server)
            replies = [ids for dialogue in answers for ids in dialogue]
            first = first if first is not None else replies
            cost.requests, cost.tokens = len(replies), sum(map(len, replies))
            cost.different += sum(map(operator.ne, replies, first))
    return costs


async def compare(server: SGLangProcess, chat: Chat, shape: Shape, rounds: int = ROUNDS) -> dict[str, Any]:
    """agentrl against both straight ways."""
    url, folder = server.url, Path(server.arguments.model_path)
    script = await script_of(url, folder, chat, shape)
    agentrl = Agentrl(url, folder, chat, shape)
    ways: dict[str, Callable[[], Awaitable[Answers]]] = {
        "agentrl": agentrl.run,
        "straight": lambda: straight(url, script, stream=True),
        "straight without a stream": lambda: straight(url, script, stream=False),
    }
    assert server.pid is not None
    costs = await in_turns(url, server.pid, ways, rounds)
    await agentrl.engine.close()
    ours = costs.pop("agentrl")
    rows: dict[str, Any] = {"agentrl": ours.report()}
    for name, cost in costs.items():
        rows[name] = cost.report() | {
            "agentrl_over_it": ratio(cost.seconds, ours.seconds),
            "agentrl_over_it_by_cpu": ratio(cost.all_cpu, ours.all_cpu),
        }
    return rows


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The median over rounds, both of the same round."""
    return round(statistics.median(map(operator.truediv, theirs, ours)), 3)


async def crowd(server: SGLangProcess, chat: Chat, shape: Shape = CROWD) -> dict[str, Any]:
    """Everything at once at one server, and how many requests it says to have."""
    url = server.url
    agentrl = Agentrl(url, Path(server.arguments.model_path), chat, shape)
    most = 0

    async def look() -> None:
        nonlocal most
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.get(f"{url}/v1/loads") as answer:
                    loads = (await answer.json())["loads"]
                most = max(most, sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads))
                await asyncio.sleep(0.2)

    looking = asyncio.create_task(look())
    began, cpu = time.perf_counter(), time.process_time()
    answers = await agentrl.run()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    looking.cancel()
    await agentrl.engine.close()
    return {
        "requests": len(answers),
        "most_at_the_server": most,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(len(ids) for (ids,) in answers) / seconds, 1),
        "client_cpu_ms_a_request": round(cpu / len(answers) * 1e3, 3),
    }


async def mode(seeded: SGLangProcess, free: SGLangProcess, chat: Chat, shape: Shape, rounds: int) -> dict[str, Any]:
    """The same lengths on a server with the deterministic mode and on one without it, sent straight."""
    script = await script_of(seeded.url, Path(seeded.arguments.model_path), chat, shape)
    unseeded = [[{**body, "sampling_params": without_seed(body["sampling_params"])} for body in one] for one in script]
    with_mode, without = [], []
    for _ in range(rounds):
        with_mode += await cpu_of_script(seeded, script)
        without += await cpu_of_script(free, unseeded)
    return {"tokens_per_cpu_second_over_without": ratio(without, with_mode)}


async def cpu_of_script(server: SGLangProcess, script: Script) -> list[float]:
    assert server.pid is not None
    ways = {"straight": lambda: straight(server.url, script, stream=True)}
    return (await in_turns(server.url, server.pid, ways, 1))["straight"].all_cpu


def without_seed(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that agentrl sends to a server that has no seeds."""
    return {**{name: value for name, value in sampling.items() if name != "sampling_seed"}, "top_k": -1}


@asynccontextmanager
async def serving(folder: Path, logs: Path, **extra: Any) -> AsyncIterator[SGLangProcess]:
    """A server of that policy, which writes a log into the folder `logs`."""
    log = logs / f"{len(list(logs.glob('*.log')))}.log"
    arguments = SGLangArguments(
        str(folder), device="cpu", context_length=MODEL_LENGTH, max_num_seqs=CROWD.dialogues, extra=extra
    )
    server = SGLangProcess(arguments, None, log)
    try:
        server.start()
        await server.ready(STARTUP)
        yield server
    finally:
        server.stop()


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        chat = policy(folder)
        async with serving(folder, Path(name)) as server:
            for shape in (SINGLE, SEVERAL):
                show(shape, await compare(server, chat, shape))
            show(CROWD, await crowd(server, chat))
            async with serving(folder, Path(name), enable_deterministic_inference=False) as free:
                show("deterministic mode", await mode(server, free, chat, SINGLE, ROUNDS))


def show(what: object, figures: dict[str, Any]) -> None:
    print(what, json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    no_options(__doc__)
    allow_many_files()
    asyncio.run(main())
