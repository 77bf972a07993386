"""Cost of a call of the code sandbox: `python -m benchmarks.tools.sandbox_latency [--runs N]`.

p50 and p99 of a call, runs a second and CPU-milliseconds a run at 1, 8 and 64 at once, over HTTP to a real server,
against a bare `subprocess.run([python, "-c", ...])` of the same program in the same run. With
`--runs 0 --soak N`, N hostile programs instead, and what they leave behind: exits with 1 where that
is more than memory.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from httpx_aiohttp import AiohttpTransport

from sandbox.claim import PREFIX
from sandbox.probe import descendants
from tests.sandbox.servers import Server, running

PROGRAMS = {
    "print(1)": "print(1)",
    "import numpy": "import numpy\nprint(numpy.arange(3).sum())",
    "import numpy, sympy": "import numpy, sympy\nx = sympy.Symbol('x')\nprint(sympy.expand((x + 1) ** 3))",
}
HOSTILE = [
    "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        import time; time.sleep(60)",
    "x = bytearray(b'1') * (1 << 30)",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time; time.sleep(600)",
    "import os; os.kill(os.getpid(), 11)",
    "open('f', 'wb').write(b'1' * (10 << 20))",
    "print('x' * 10_000_000)",
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "import socket\nkept = [socket.socketpair() for _ in range(200)]",
    "import os\nfor n in range(6000): os.mkdir(f'd{n}')",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()",
]


@dataclass(frozen=True, slots=True)
class Figures:
    p50: float
    p99: float
    per_second: float
    cpu_ms: float

    def cells(self) -> str:
        return f"{self.p50 * 1e3:.0f} | {self.p99 * 1e3:.0f} | {self.per_second:.0f} | {self.cpu_ms:.0f}"


async def measure(
    call: Callable[[], Awaitable[None]], cpu: Callable[[], float], concurrency: int, runs: int
) -> Figures:
    """`runs` calls, `concurrency` at once."""
    times: list[float] = []
    left = iter(range(runs))

    async def worker() -> None:
        for _ in left:
            started = time.perf_counter()
            await call()
            times.append(time.perf_counter() - started)

    cpu_before, started = cpu(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    cuts = statistics.quantiles(times, n=100)
    return Figures(cuts[49], cuts[98], runs / seconds, (cpu() - cpu_before) * 1e3 / runs)


async def bare(program: str) -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", program]
    await asyncio.to_thread(subprocess.run, arguments, check=True, stdout=subprocess.DEVNULL, env=environment)


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def server_cpu(server: Server) -> float:
    """Seconds of the server and all that it ever started."""
    ticks = 0
    for pid in {server.process.pid, *descendants(server.process.pid)}:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


async def main() -> bool:
    """Measure the calls, or soak the server; return False where a soak left something behind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--soak", type=int, default=0)
    asked = parser.parse_args()
    with running(None, options=("--concurrency", "8", "--queue", "4096")) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, transport=AiohttpTransport()) as client:

            async def sandboxed(program: str) -> None:
                answer = await client.post("/run_code", json={"code": program, "language": "python"})
                assert answer.json()["status"] == "Success", answer.text

            print(f"tier {(await client.get('/health')).json()['tier']}, load {os.getloadavg()[0]:.1f}")
            if not asked.runs:
                return await soak(server, client, asked.soak)
            print("| program | at once | | p50 ms | p99 ms | runs/s | CPU ms |\n|---|---|---|---|---|---|---|")
            for name, program in PROGRAMS.items():
                for concurrency in (1, 8, 64):
                    runs = max(asked.runs if "numpy" not in name else asked.runs // 3, concurrency)
                    few = max(runs // 3, concurrency)
                    plain = await measure(functools.partial(bare, program), children_cpu, concurrency, few)
                    warm = await measure(
                        functools.partial(sandboxed, program),
                        functools.partial(server_cpu, server),
                        concurrency,
                        runs,
                    )
                    print(f"| `{name}` | {concurrency} | sandbox | {warm.cells()} |")
                    print(f"| | | bare | {plain.cells()} |", flush=True)
    return True


async def soak(server: Server, client: httpx.AsyncClient, runs: int) -> bool:
    """Check that `runs` hostile programs, every tenth in a session, leave no process, file or control group behind."""

    async def one(place: int) -> None:
        code = HOSTILE[place % len(HOSTILE)]
        if place % 10 == 0:
            body = {"code": code, "session_id": str(place), "memory_limit_MB": 128, "run_timeout": 0.5}
            answer = await client.post("/run_session", json=body)
            await client.delete(f"/sessions/{place}")
        else:
            body = {"code": code, "language": "python", "memory_limit_MB": 128, "run_timeout": 0.5}
            answer = await client.post("/run_code", json=body)
        assert answer.json()["status"] != "SandboxError", answer.text

    async def all_of(numbers: Iterable[int]) -> None:
        left = iter(numbers)

        async def worker() -> None:
            for place in left:
                await one(place)

        await asyncio.gather(*(worker() for _ in range(8)))
        await asyncio.sleep(2)

    await all_of(range(8 * len(HOSTILE)))  # buffers and pools find their size
    before, started = held(server), time.perf_counter()
    await all_of(range(runs))
    after = held(server)
    print(f"soak: {runs} hostile runs in {time.perf_counter() - started:.0f} s")
    for name, value in before.items():
        print(f"  {name}: {value} before, {after[name]} after")
    return all(after[name] <= value for name, value in before.items() if name != "MiB")


def held(server: Server) -> dict[str, int]:
    """Count what a server holds, and its files in /tmp."""
    pids = {server.process.pid, *server.processes()}
    fds = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
    groups = sum(1 for _ in Path("/sys/fs/cgroup").glob(f"*/**/{PREFIX}{server.process.pid}-*/run*"))
    return {
        "processes": len(pids),
        "open files": fds,
        "control groups": groups,
        "files in /tmp": sum(1 for _ in Path(tempfile.gettempdir()).rglob(f"{PREFIX}*")),
        "MiB": server.memory() >> 20,
    }


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
