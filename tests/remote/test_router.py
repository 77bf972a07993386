"""The address behind which servers of one model answer: what callers see of servers that fail, hang and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

from agentrl.errors import ConfigError
from agentrl.remote.router import ModelRouter, ServerAccess
from tests.naming import assert_names, naming
from tests.remote.conftest import FaultyServer, hangs, says

Serve = Callable[..., Awaitable[FaultyServer]]
MODELS = says(200, '{"data": []}')


@asynccontextmanager
async def routed(*servers: FaultyServer, key: str | None = None) -> AsyncIterator[tuple[ModelRouter, list[str]]]:
    """A router of these servers, and what it warned of."""
    warnings: list[str] = []
    it = ModelRouter(ServerAccess(tuple(one.url.rstrip("/") for one in servers), key), warnings.append)
    await asyncio.to_thread(it.start, 5.0)
    try:
        yield it, warnings
    finally:
        await asyncio.to_thread(it.close)


async def asked(it: ModelRouter, path: str = "/v1/chat/completions?a=1") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{it.address}{path}", json={"x": 1}) as answer,
    ):
        return answer.status, await answer.text()


async def test_a_caller_sees_no_fault_of_a_server(server: Serve) -> None:
    """What is refused is the caller's to see; errors of a server, and one that is busy, cost it time alone."""
    s = await server(MODELS, says(500, "out of memory"), says(429), says(200, "yes"), says(400, "too long"))
    async with routed(s, key="secret") as (it, warnings):
        assert await asked(it) == (200, "yes")
        assert await asked(it) == (400, "too long")
        assert (dict(it.take_metrics()), dict(it.take_metrics())) == ({"retries": 2.0}, {"retries": 0.0})
    assert_names(warnings[0], "status 500")
    assert len(warnings) == 1
    last = s.asked[-1]
    assert (last.path_qs, last.headers["Authorization"], s.bodies[-1]) == (
        "/v1/chat/completions?a=1",
        "Bearer secret",
        b'{"x": 1}',
    )


async def test_a_server_that_ends_is_waited_for_or_replaced(server: Serve) -> None:
    one, two = await server(says(200, "one")), await server(says(200, "two"))
    async with routed(one, two) as (it, _):
        await one.stop()
        assert [await asked(it) for _ in range(3)] == [(200, "two")] * 3
        await two.stop()
        waiting = asyncio.create_task(asked(it))
        await asyncio.sleep(0.3)
        assert not waiting.done(), "no answer is better than an error that may become a reward of zero"
        await one.start()
        assert await waiting == (200, "one")


async def test_requests_run_where_fewest_do_and_end_with_their_caller(server: Serve) -> None:
    slow, free = await server(MODELS, hangs), await server(MODELS, says(200, "free"))
    async with routed(slow, free) as (it, _):
        hanging = asyncio.create_task(asked(it))
        await asyncio.sleep(0.1)
        assert [await asked(it) for _ in range(3)] == [(200, "free")] * 3
        hanging.cancel()
        while it._running[slow.url.rstrip("/")]:
            await asyncio.sleep(0.01)


async def test_one_that_does_not_answer_is_told_at_the_start(server: Serve) -> None:
    s = await server(says(503))
    it = ModelRouter(ServerAccess((s.url.rstrip("/"),)), print)
    with naming(ConfigError, "0.6 s", "status 503"):
        await asyncio.to_thread(it.start, 0.6)
    it.close()  # as the manager does that failed to start


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(ServerAccess(("http://a",), "secret"))
