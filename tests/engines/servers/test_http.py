"""Control requests of the clients of servers, to a real uvicorn."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.http import ServerHTTP
from agentrl.system.http import http_client

CALLS = 50
app = FastAPI()


@app.post("/fails")
async def fails() -> None:
    raise RuntimeError("an update is already active")


@app.post("/works")
async def works() -> dict[str, bool]:
    return {"success": True}


@pytest.fixture
def url() -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


async def test_a_call_after_an_answer_of_500_reaches_the_server(url: str) -> None:
    """uvicorn closes a connection after an error of its application, which the answer does not say."""
    async with http_client() as http:
        client = ServerHTTP(url, http)
        for _ in range(CALLS):
            with pytest.raises(EngineError, match="status 500"):
                await client.post("fails", {})
            assert await client.post("works", {}) == b'{"success":true}'
