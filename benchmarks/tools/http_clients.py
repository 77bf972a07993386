"""Cost of a request for HTTP clients that keep 1,000 requests in flight: aiohttp, httpx, and httpx on aiohttp.

    python -m benchmarks.tools.http_clients [--in-flight N] [--requests N]

A server in a process of its own answers each request after 0.1 s. Every client keeps the same number of requests in
flight, without a cap on connections. Prints requests/s, the client's CPU milliseconds a request, and the ratio of that
time to aiohttp's in the same run. See docs/decisions/043-http-by-aiohttp.md.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import httpx
from httpx_aiohttp import AiohttpTransport

from agentrl.system.http import allow_many_files, http_client

SERVER = """
import asyncio
from aiohttp import web
from agentrl.system.http import allow_many_files

async def answer(request):
    await asyncio.sleep(0.1)
    return web.json_response({"answer": len(await request.read())})

async def serve():
    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

allow_many_files()
asyncio.run(serve())
"""
BODY = b"x" * 1000


async def pace(ask: Callable[[], Awaitable[None]], in_flight: int, requests: int) -> tuple[float, float]:
    """Requests a second, and the client's CPU milliseconds a request."""
    left = iter(range(requests))

    async def worker() -> None:
        for _ in left:
            await ask()

    await ask()
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return requests / (time.perf_counter() - began), 1000 * (time.process_time() - cpu) / requests


async def measure(url: str, in_flight: int, requests: int) -> None:
    async with http_client() as session:

        async def by_aiohttp() -> None:
            async with session.post(url, data=BODY) as response:
                await response.read()

        rate, least = await pace(by_aiohttp, in_flight, requests)
    print(f"{'aiohttp':18} {rate:6.0f} requests/s, {least:6.2f} ms CPU a request, ratio 1.00")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    transports = {"httpx": httpx.AsyncHTTPTransport(limits=limits), "httpx on aiohttp": AiohttpTransport(limits=limits)}
    for name, transport in transports.items():
        async with httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:

            async def by_httpx(client: httpx.AsyncClient = client) -> None:
                (await client.post(url, content=BODY)).raise_for_status()

            rate, cost = await pace(by_httpx, in_flight, requests)
        print(f"{name:18} {rate:6.0f} requests/s, {cost:6.2f} ms CPU a request, ratio {cost / least:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=2000)
    asked = parser.parse_args()
    allow_many_files()
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            asyncio.run(measure(f"http://127.0.0.1:{port}/", asked.in_flight, asked.requests))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
