"""1,000 queries at once to the retriever's server, over the 117,659 definitions of WordNet 3.0.

`apt-get install wordnet-base`, then `python -m benchmarks.tools.retriever`. The client, one process on the same cores,
keeps 1,000 requests of one query each in flight; queries are words of definitions. Measured: making the index, time
until the server answers its first query, queries a second, latency as the client sees it, and memory of each worker
(unique: not shared with the others; PSS: shared pages divided among those who share them). Then 64 queries a request.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from agentrl.system.http import allow_many_files, http_client
from benchmarks.no_options import no_options

WORDNET = Path("/usr/share/wordnet")
IN_FLIGHT = 1_000
REQUESTS = 10_000
WORDS = 8
BATCH = 64
RUNS = 3


def passages() -> Iterator[str]:
    """`"Title"\\ntext` of every definition (wndb(5WN): two spaces begin the licence, a bar the gloss)."""
    for kind in ("noun", "verb", "adj", "adv"):
        for line in (WORDNET / f"data.{kind}").read_text(encoding="utf-8", errors="replace").splitlines():
            if not line.startswith("  "):
                data, _, gloss = line.partition("|")
                yield f'"{data.split()[4].replace("_", " ")}"\n{gloss.strip()}'


def make_index(folder: Path, contents: list[str]) -> Path:
    corpus, index = folder / "wordnet.jsonl", folder / "index"
    corpus.write_text("".join(json.dumps({"contents": text}) + "\n" for text in contents))
    begun = time.perf_counter()
    run = [sys.executable, "-m", "tools.retriever", "index", str(corpus), str(index)]
    subprocess.run(run, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - begun
    size = sum(path.stat().st_size for path in index.rglob("*") if path.is_file())
    megabytes = f"{size / 1e6:.0f} MB of a corpus of {corpus.stat().st_size / 1e6:.0f} MB"
    print(f"index: {len(contents):,} passages in {seconds:.1f} s, {megabytes}")
    return index


class Server:
    """`python -m tools.retriever serve` as a process."""

    def __init__(self, index: Path, workers: int) -> None:
        run = [sys.executable, "-m", "tools.retriever", "serve", str(index), "--port", "0", "--workers", str(workers)]
        self.workers = workers
        self.process = subprocess.Popen(run, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.split("POST ")[1].split(",")[0]

    def pids(self) -> list[int]:
        if self.workers == 1:
            return [self.process.pid]
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]

    def memory(self) -> str:
        """MB a worker."""
        found = []
        for pid in self.pids():
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            unique = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
            found.append(f"{unique / 1e3:.0f} unique, {kilobytes['Pss'] / 1e3:.0f} PSS")
        return "; ".join(found)

    def cpu(self) -> float:
        """Seconds of all workers."""
        return sum(_cpu(pid) for pid in self.pids())

    async def first_answer(self, http: aiohttp.ClientSession) -> None:
        while True:
            try:
                await ask(http, self.url, ["a first question"])
                return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def ask(http: aiohttp.ClientSession, url: str, queries: list[str]) -> int:
    """Documents found."""
    async with http.post(url, json={"queries": queries, "topk": 3, "return_scores": True}) as response:
        assert response.status == 200, await response.text()
        return sum(map(len, (await response.json())["result"]))


async def load(http: aiohttp.ClientSession, server: Server, queries: list[str], batch: int, in_flight: int) -> None:
    """Prints one run's figures."""
    requests = [queries[begin : begin + batch] for begin in range(0, len(queries), batch)]
    left = iter(requests)
    seconds: list[float] = []
    found = 0

    async def client() -> None:
        nonlocal found
        for request in left:
            begun = time.perf_counter()
            documents = await ask(http, server.url, request)
            found += documents
            seconds.append(time.perf_counter() - begun)

    begun, cpu, own = time.perf_counter(), server.cpu(), time.process_time()
    await asyncio.gather(*(client() for _ in range(in_flight)))
    took = time.perf_counter() - begun
    seconds.sort()
    p50, p99 = (seconds[int(len(seconds) * part)] for part in (0.5, 0.99))
    count, server_cpu, own_cpu = len(queries), server.cpu() - cpu, time.process_time() - own
    print(
        f"  {in_flight:5,} in flight, {batch:2} a request: {count / took:6,.0f} queries/s, p50 {p50 * 1e3:5.0f} ms, "
        f"p99 {p99 * 1e3:5.0f} ms; CPU a query: server {server_cpu / count * 1e3:.2f} ms, "
        f"client {own_cpu / count * 1e3:.2f} ms; {found / count:.2f} documents a query"
    )


async def main() -> None:
    if not WORDNET.is_dir():
        sys.exit(f"error: {WORDNET} is not there: apt-get install wordnet-base")
    allow_many_files()
    rng = random.Random(0)
    contents = list(passages())

    def question() -> str:
        words = rng.choice(contents).split()
        return " ".join(rng.sample(words, min(WORDS, len(words))))

    queries = [question() for _ in range(REQUESTS)]
    with tempfile.TemporaryDirectory() as folder:
        index = make_index(Path(folder), contents)
        for workers in (1, 2):
            begun = time.perf_counter()
            server = Server(index, workers)
            async with http_client() as http:
                try:
                    await server.first_answer(http)
                    print(f"{workers} worker(s): first answer after {time.perf_counter() - begun:.1f} s")
                    for _ in range(RUNS):
                        await load(http, server, queries, 1, IN_FLIGHT)
                    await load(http, server, queries[:1_000], 1, 1)
                    await load(http, server, queries, BATCH, 16)
                    print(f"  MB by worker: {server.memory()}")
                finally:
                    server.stop()


if __name__ == "__main__":
    no_options(__doc__)
    asyncio.run(main())
