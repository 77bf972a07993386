"""A tool's server, and a judge's, that fails on purpose: `GET /search`, `POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Literal

from aiohttp import web

from labs.fault_matrix.mark import mark

ToolFault = Literal["500", "hang", "garbage", "flood", "rubbish"]
FIRST, COUNT = 12, {"500": 4, "hang": 2, "garbage": 2, "flood": 2, "rubbish": 7}
"""The request that meets the fault first, counted from 1, and how many meet it."""
FLOOD = 16 << 20


class ToolServer:
    """`fault` is noted in `folder`."""

    def __init__(self, folder: Path, fault: ToolFault) -> None:
        self.folder, self.fault, self.requests = folder, fault, 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/search", self.search)
        app.router.add_post("/v1/chat/completions", self.verdict)
        app.router.add_get("/v1/models", self.models)
        return app

    def is_faulty(self) -> bool:
        self.requests += 1
        faulty = FIRST <= self.requests < FIRST + COUNT[self.fault]
        if faulty:
            mark(self.folder)
        return faulty

    async def search(self, request: web.Request) -> web.Response:
        if not self.is_faulty():
            return web.json_response({"text": "a is 1"})
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "500":
            return web.Response(status=500, text="POISON")
        if self.fault == "garbage":
            return web.Response(body=b'{"text": "POISON\xff\x00', content_type="application/json")
        return web.json_response({"text": "POISON " * (FLOOD // 7)})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "judge", "object": "model"}]})

    async def verdict(self, request: web.Request) -> web.Response:
        """Judge by the length of what is asked, from 3 to 8; never 0."""
        asked = json.dumps(await request.json())
        said = json.dumps({"reason": "so", "score": 3 + len(re.sub(r"\W", "", asked)) % 6})
        if self.is_faulty():
            said = '{"score": NaN, "score": 1e999, [[[[ 0 out of 10'
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "1", "object": "chat.completion", "model": "judge", "choices": [choice]})


def serve(folder: Path, fault: ToolFault, port: int) -> None:
    """Serve until the process is ended."""
    web.run_app(
        ToolServer(folder, fault).app(), host="127.0.0.1", port=port, print=None, access_log=None, handle_signals=False
    )
