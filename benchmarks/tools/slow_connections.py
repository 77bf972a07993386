"""Honest requests beside 1,000 slow connections from the same address: `python -m benchmarks.tools.slow_connections`.

At the sandbox, the retriever and the OpenAI endpoint, each a process of its own. A slow connection declares a body and
sends a byte a second, declares one and sends nothing, or does not end its headers; where the server closes it, it
comes again within a second. Rounds without and with them take turns; each round with them is compared with the one
before it. Exits with 1 where an honest request was refused, or where the median latency beside slow connections is more
than three times the undisturbed one, in the median of the rounds.

On a busy machine latencies are the machine's. Beside them stand CPU-seconds of the server's process, which no other
work changes: of an honest request, and of a second with the slow connections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from agentrl.system.http import allow_many_files, http_client
from agentrl.system.json_value import JSON
from tests.sandbox.servers import running
from tools.retriever.build import create

SLOW = 1_000
AT_ONCE = 8
REQUESTS = 200
"""Honest requests of a round."""
ROUNDS = 3
MOST = 3.0
"""Median latency beside slow connections over the undisturbed one."""
DECLARED = 10 << 20


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    port: int
    path: Callable[[int], str]
    """Path of the request with a number."""
    body: dict[str, JSON]
    pid: int
    """The process that listens."""

    def cpu(self) -> float:
        """CPU-seconds of it so far."""
        used = psutil.Process(self.pid).cpu_times()
        return float(used.user + used.system)

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.port}{self.path(number)}"


@contextlib.contextmanager
def sandbox() -> Iterator[Target]:
    with running(None, options=("--concurrency", "8", "--queue", "4096")) as server:
        body: dict[str, JSON] = {"code": "1", "language": "python"}
        yield Target("sandbox", int(server.url.rpartition(":")[2]), lambda _: "/run_code", body, server.process.pid)


@contextlib.contextmanager
def started(*words: str) -> Iterator[tuple[str, int]]:
    """The first line that a module of Python prints, which runs until the end, and its process."""
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline(), process.pid
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def retriever() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        corpus.write_text("".join(json.dumps({"contents": f"number {n}"}) + "\n" for n in range(1000)))
        create([corpus], Path(folder, "index"))
        with started("tools.retriever", "serve", f"{folder}/index", "--port", "0") as (line, pid):
            port = int(line.split("/retrieve")[0].rpartition(":")[2])
            yield Target("retriever", port, lambda _: "/retrieve", {"queries": ["number 7"]}, pid)


@contextlib.contextmanager
def endpoint() -> Iterator[Target]:
    with started("benchmarks.tools.slow_connections", "--endpoint") as (line, pid):
        urls: list[str] = json.loads(line)
        paths = [url.split("/", 3)[3] for url in urls]
        port = int(urls[0].split("/")[2].rpartition(":")[2])
        body: dict[str, JSON] = {"model": "policy", "messages": [{"role": "user", "content": "Say ok."}]}
        yield Target(
            "OpenAI endpoint", port, lambda number: f"/{paths[number % len(paths)]}/chat/completions", body, pid
        )


async def serve_endpoint() -> None:
    """Print the URLs of open sessions, as many as requests will come, and serve them."""
    from agentrl.agent_loop import Episode, LoopContext  # with torch, which slow clients on the same cores do without
    from agentrl.chat import Chat
    from agentrl.engines.contract import SamplingParams
    from agentrl.openai_api import Endpoint
    from agentrl.quickstart.tiny_policy import make_tiny_policy
    from agentrl.tool.toolset import ToolSet
    from agentrl.trajectory import Trajectory
    from tests.agent_loop.conftest import LIMITS, sample
    from tests.agent_loop.scripted_engine import ScriptedEngine

    with tempfile.TemporaryDirectory() as folder:
        chat = Chat.from_pretrained(str(make_tiny_policy(Path(folder), seed=1)))
        engine = ScriptedEngine(chat, lambda session, turn: "ok")
        context = LoopContext(engine, chat, ToolSet.from_tools([]), {}, LIMITS)
        endpoint = Endpoint()
        await endpoint.start()
        async with contextlib.AsyncExitStack() as stack:
            urls = []
            for number in range((2 * ROUNDS + 1) * REQUESTS):
                uid = f"s{number}"
                episode = Episode(context, sample(), Trajectory(uid, 0), SamplingParams(1), seed=number, session=uid)
                _, url = await stack.enter_async_context(endpoint.session(episode))
                urls.append(url)
            print(json.dumps(urls), flush=True)
            await asyncio.Event().wait()


class Slow(asyncio.Protocol):
    """One slow connection after another: `said` at once, then `drop` at each `drip`."""

    def __init__(self, port: int, path: str, number: int) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
        declared = b"Content-Length: %d\r\n\r\n" % DECLARED
        self.said, self.drop = [(head + declared, b" "), (head + declared, b""), (head + b"X-A: ", b"a")][number % 3]
        self.port = port
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.said)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    async def drip(self) -> None:
        if self.transport is not None:
            self.transport.write(self.drop)
            return
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self.port)


async def all_slow(port: int, path: str) -> None:
    """Each of them drips once a second, in turn. `path`: one that reads bodies; others are answered at once."""
    allow_many_files()
    connections = [Slow(port, path, number) for number in range(SLOW)]
    for place in itertools.count():
        began = time.monotonic()
        for number in range(0, SLOW, 20):
            for connection in connections[number : number + 20]:
                await connection.drip()
            await asyncio.sleep(max(0.0, began + (number + 20) / SLOW - time.monotonic()))
        if place == 1:
            print("ready", flush=True)


@contextlib.asynccontextmanager
async def beside_slow_ones(target: Target) -> AsyncIterator[None]:
    words = [sys.executable, "-m", "benchmarks.tools.slow_connections", "--slow", str(target.port), target.path(0)]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield
    finally:
        process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True)
class Round:
    """Honest requests, and what they cost."""

    latencies: list[float]
    refused: int
    cpu: float
    """CPU-seconds of the server's process."""
    seconds: float


async def load(http: aiohttp.ClientSession, target: Target, begin: int) -> Round:
    """Make the honest requests from number `begin` on."""
    numbers = iter(range(begin, begin + REQUESTS))
    latencies: list[float] = []
    refused = 0

    async def client() -> None:
        nonlocal refused
        for number in numbers:
            started = time.perf_counter()
            try:
                async with http.post(target.url(number), json=target.body) as response:
                    answer = await response.read()
                    if response.status != 200:
                        raise aiohttp.ClientError(response.status, answer)
            except aiohttp.ClientError as error:
                refused += 1
                print(f"{target.name}: refused: {error!r:.300}", flush=True)
            latencies.append(time.perf_counter() - started)

    cpu, began = target.cpu(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return Round(latencies, refused, target.cpu() - cpu, time.perf_counter() - began)


async def measure(target: Target) -> bool:
    """True when the target held."""
    alone: list[Round] = []
    beside: list[Round] = []
    async with http_client() as http:
        while True:  # some say where they listen before they do
            with contextlib.suppress(aiohttp.ClientConnectorError):
                await (await http.get(f"http://127.0.0.1:{target.port}/health")).read()
                break
            await asyncio.sleep(0.1)
        await load(http, target, 2 * ROUNDS * REQUESTS)  # the first ones of a process take longer
        for place in range(ROUNDS):
            alone.append(await load(http, target, 2 * place * REQUESTS))
            async with beside_slow_ones(target):
                beside.append(await load(http, target, (2 * place + 1) * REQUESTS))
    ratio = statistics.median(
        statistics.median(disturbed.latencies) / statistics.median(quiet.latencies)
        for quiet, disturbed in zip(alone, beside, strict=True)
    )
    refused = sum(one.refused for one in [*alone, *beside])
    print(
        f"{target.name}: p50 {percentile(alone, 50):.1f} ms alone, {percentile(beside, 50):.1f} ms beside {SLOW:,} "
        f"slow connections: {ratio:.2f} times (median of {ROUNDS} rounds); p99 {percentile(alone, 99):.1f} and "
        f"{percentile(beside, 99):.1f} ms; {refused} of {2 * ROUNDS * REQUESTS} refused; {costs(alone, beside)}",
        flush=True,
    )
    return ratio <= MOST and not refused


def percentile(rounds: list[Round], percent: int) -> float:
    """Milliseconds of all honest requests of the rounds."""
    latencies = [seconds for one in rounds for seconds in one.latencies]
    return 1e3 * statistics.quantiles(latencies, n=100)[percent - 1]


def costs(alone: list[Round], beside: list[Round]) -> str:
    """Say what an honest request, and a second with the slow connections, cost the server's process."""
    request = sum(one.cpu for one in alone) / (ROUNDS * REQUESTS)
    rest = sum(one.cpu for one in beside) - request * ROUNDS * REQUESTS
    share = rest / sum(one.seconds for one in beside)
    return f"the server's CPU: {1e3 * request:.2f} ms a request, {100 * share:.0f} % of a core for slow connections"


async def main() -> bool:
    """True when all targets held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["sandbox", "retriever", "endpoint"], help="one of the servers")
    parser.add_argument("--slow", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.endpoint:
        await serve_endpoint()
    if asked.slow:
        port, path = asked.slow
        await all_slow(int(port), path)
    held = True
    for start in (sandbox, retriever, endpoint):
        if asked.only in (None, start.__name__):
            with start() as target:
                held &= await measure(target)
    return held


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
