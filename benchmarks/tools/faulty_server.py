"""A server for search and code sessions that fails on purpose: `python -m benchmarks.tools.faulty_server --port 8099`.

It speaks `/retrieve`, `/run_session` and `/sessions/{id}` as agentrl's servers do, and of the POST requests 5 % fail
(a third each: 500, 503 with Retry-After, a connection that breaks) and 1 % are never answered. No program is run: a
cell only counts the session's cells.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

from aiohttp import web


class FaultyServer:
    """`failing`, `hanging`: fractions of the POST requests."""

    def __init__(self, failing: float, hanging: float, seed: int) -> None:
        self.failing, self.hanging = failing, hanging
        self.random = random.Random(seed)
        self.cells: dict[str, int] = {}
        self.counts = {"requests": 0, "failed": 0, "hung": 0, "sessions": 0}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._faults])
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_post("/run_session", self._cell)
        app.router.add_delete("/sessions/{name}", self._close)
        app.router.add_get("/health", self._health)
        return app

    @web.middleware
    async def _faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        chance = self.random.random()
        if request.method != "POST" or chance >= self.failing + self.hanging:
            answer: web.StreamResponse = await handler(request)
            return answer
        self.counts["requests"] += 1
        if chance < self.hanging:
            self.counts["hung"] += 1
            await asyncio.sleep(3600)
        self.counts["failed"] += 1
        kind = self.random.randrange(3)
        if kind == 0:
            return web.json_response({"detail": "injected"}, status=500)
        if kind == 1:
            return web.json_response({"detail": "injected"}, status=503, headers={"Retry-After": "0.2"})
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def _retrieve(self, request: web.Request) -> web.Response:
        self.counts["requests"] += 1
        asked = await request.json()
        found = [
            {"document": {"id": "0", "contents": f'"{query}"\nIt is 42.'}, "score": 1.0} for query in asked["queries"]
        ]
        return web.json_response({"result": [[item] for item in found]})

    async def _cell(self, request: web.Request) -> web.Response:
        self.counts["requests"] += 1
        name = (await request.json())["session_id"]
        created = name not in self.cells
        self.cells[name] = self.cells.get(name, 0) + 1
        said = {"status": "Finished", "stdout": f"{self.cells[name]}\n", "stderr": "", "return_code": 0}
        return web.json_response(
            {"status": "Success", "message": "", "created": created, "alive": True, "run_result": said}
        )

    async def _close(self, request: web.Request) -> web.Response:
        return web.json_response({"closed": self.cells.pop(request.match_info["name"], None) is not None})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({**self.counts, "status": "ok", "sessions": len(self.cells)})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools.faulty_server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--failing", type=float, default=0.05)
    parser.add_argument("--hanging", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    server = FaultyServer(given.failing, given.hanging, given.seed)
    web.run_app(server.app(), host="127.0.0.1", port=given.port, print=None, backlog=4096, access_log=None)


if __name__ == "__main__":
    main()
