"""The one client of servers: what it repeats and what not, what it raises, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agentrl.errors import ConfigError
from agentrl.remote import FaultKind, RemoteClient, RemoteFault, RemoteOptions, RemoteRefused, RemoteUnavailable
from agentrl.system.deadline import within
from tests.naming import assert_names, naming
from tests.remote.conftest import FaultyServer, breaks, hangs, says

Start = Callable[..., Awaitable[FaultyServer]]


@asynccontextmanager
async def client_of(**options: Any) -> AsyncIterator[RemoteClient]:
    client = RemoteClient("the server", RemoteOptions(**options))
    try:
        yield client
    finally:
        await client.close()


async def ask(client: RemoteClient, server: FaultyServer, seconds: float = 20.0, *, safe: bool = True) -> str:
    async with within(seconds):
        answer = await client.request("POST", server.url, body=b"{}", safe=safe)
    return answer.body.decode()


@pytest.mark.parametrize("fault", [says(500), says(502), says(429), says(503), breaks, hangs])
async def test_what_is_safe_is_asked_again(server: Start, fault: Any) -> None:
    here = await server(fault, fault, says(200, "good"))
    async with client_of(attempt_timeout=0.3) as client:
        assert await ask(client, here) == "good"
        assert client.take_metrics()["retries"] == 2
    assert here.bodies == [b"{}"] * 3


@pytest.mark.parametrize("fault", [says(500), breaks, hangs])
async def test_what_may_have_been_done_is_not_done_again(server: Start, fault: Any) -> None:
    here = await server(fault, says(200, "good"))
    async with client_of(attempt_timeout=0.3) as client:
        with pytest.raises(RemoteUnavailable):
            await ask(client, here, 1.5, safe=False)
    assert len(here.asked) == 1


async def test_what_would_not_be_asked_again_has_all_of_the_time_there_is(server: Start) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return web.Response(text="good")

    here = await server(slow)
    async with client_of(attempt_timeout=0.2) as client:
        assert await ask(client, here, safe=False) == "good"


@pytest.mark.parametrize("fault", [says(429), says(503)])
async def test_what_surely_was_not_begun_is_asked_again(server: Start, fault: Any) -> None:
    here = await server(fault, says(200, "good"))
    async with client_of() as client:
        assert await ask(client, here, safe=False) == "good"


async def test_a_server_that_is_not_there_yet_is_waited_for_by_all(server: Start) -> None:
    here = await server(says(200, "good"))
    await here.stop()
    async with client_of(breaker_failures=2, breaker_seconds=0.2, attempts=99) as client:
        asking = [asyncio.create_task(ask(client, here, safe=False)) for _ in range(40)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in asking)
        await here.start()
        assert await asyncio.gather(*asking) == ["good"] * 40
    assert len(here.asked) == 40


async def test_the_deadline_holds_and_the_cause_is_told(server: Start) -> None:
    here = await server(hangs)
    async with client_of(attempt_timeout=0.2, attempts=99) as client:
        with pytest.raises(
            RemoteUnavailable, match=r"the server: no answer within [\d.]+ s \(\d+ attempts\)"
        ) as raised:
            await ask(client, here, 3.0)
    assert raised.value.kind is FaultKind.TIMEOUT
    assert 1 < len(here.asked) <= 3.0 / 0.2, "99 attempts would take 20 seconds"


async def test_what_is_not_repeated_has_the_whole_deadline_and_is_counted(server: Start) -> None:
    here = await server(hangs)
    async with client_of(attempt_timeout=0.1) as client:
        with pytest.raises(RemoteUnavailable, match=r"the server: no answer within (?!0\.1 s)[\d.]+ s$"):
            await ask(client, here, 3.0, safe=False)
        assert client.take_metrics()["fault/timeout"] == 1


async def test_no_attempt_is_begun_that_could_not_end(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    here, slept, sleep = await server(says(503, Retry_After="60")), list[float](), asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    async with client_of() as client:
        with pytest.raises(RemoteUnavailable, match="status 503"):
            await ask(client, here, 50.0)
    assert not any(slept), "it does not sit out a deadline that the pause is longer than"
    assert len(here.asked) == 1


async def test_the_server_says_when_to_come_again(server: Start) -> None:
    here = await server(says(429, Retry_After="0.6"), says(200, "good"))
    async with client_of() as client:
        begun = time.monotonic()
        assert await ask(client, here) == "good"
        assert time.monotonic() - begun >= 0.6


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
async def test_a_refusal_is_the_callers_and_is_not_repeated(server: Start, status: int) -> None:
    here = await server(says(status, '{"detail": "no such city"}'))
    async with client_of() as client:
        with pytest.raises(RemoteRefused, match="no such city") as raised:
            await ask(client, here)
    assert (raised.value.status, len(here.asked)) == (status, 1)


@pytest.mark.parametrize("handler", [says(302, Location="http://127.0.0.1:1/"), says(401), says(403)])
async def test_redirects_and_refused_credentials_are_nobodys_answer(server: Start, handler: Any) -> None:
    here = await server(handler)
    async with client_of() as client:
        with pytest.raises(RemoteUnavailable):
            await ask(client, here)
    assert len(here.asked) == 1  # neither followed nor repeated


async def test_an_answer_without_end_is_cut_off(server: Start) -> None:
    here = await server(says(200, "x" * 100_000))
    async with client_of() as client:
        with pytest.raises(RemoteUnavailable, match="longer than 1000 bytes"):
            await client.request("GET", here.url, safe=True, max_answer_bytes=1000)


async def test_the_server_is_told_who_asks_and_how_long_it_has(server: Start) -> None:
    here = await server(says(200))
    async with client_of(attempt_timeout=4.0) as client:
        client.run = "project/run"
        await ask(client, here, 100.0)
        await ask(client, here, 2.0)
        for runs in (3.0, 60.0):  # what has begun is waited for
            await client.request("GET", here.url, safe=True, runs=runs)
    first, second, *later = (request.headers for request in here.asked)
    assert first["x-client-id"] == "project/run"
    assert 3000 < int(first["x-request-timeout-ms"]) <= 4000
    assert 1000 < int(second["x-request-timeout-ms"]) < 2000
    assert [int(headers["x-request-timeout-ms"]) for headers in later] == [1000, 1000]


async def test_behind_an_open_breaker_only_probes_are_sent(server: Start) -> None:
    here = await server(says(500))
    async with client_of(breaker_failures=3, breaker_seconds=0.2, attempts=99) as client:
        for _ in range(3):
            with pytest.raises(RemoteUnavailable):
                await ask(client, here, 0.1, safe=False)
        before = len(here.asked)
        results = await asyncio.gather(*(ask(client, here, 1.0) for _ in range(50)), return_exceptions=True)
        metrics = client.take_metrics()
    assert all(isinstance(result, RemoteUnavailable) for result in results)
    assert "left alone" in str(results[0])
    assert len(here.asked) - before <= 6  # one about every 0.2 s, where 50 calls would have sent hundreds
    assert metrics["breaker_open"] == 1 and metrics["breaker_opened"] >= 1 and metrics["fault/server"] >= 4


async def test_being_busy_or_refusing_does_not_open_the_breaker(server: Start) -> None:
    here = await server(says(429), *[says(504)] * 2, *[says(404)] * 6, says(200, "good"))
    async with client_of(breaker_failures=2, breaker_seconds=60.0) as client:
        for _ in range(6):
            with pytest.raises(RemoteRefused):
                await ask(client, here)
        assert await ask(client, here) == "good"


async def test_a_probe_that_is_cancelled_lets_another_one_try() -> None:
    async with client_of(breaker_failures=1, breaker_seconds=0.05, attempts=1) as client:
        started = asyncio.Event()

        async def fails(seconds: float) -> str:
            raise RemoteFault(FaultKind.SERVER, "no")

        async def waits(seconds: float) -> str:
            started.set()
            await asyncio.sleep(60)
            return "never"

        async def works(seconds: float) -> str:
            return "good"

        with pytest.raises(RemoteUnavailable):
            await client.call(fails, safe=True)
        probe = asyncio.create_task(client.call(waits, safe=True))
        await started.wait()
        probe.cancel()
        async with within(5.0):
            assert await client.call(works, safe=True) == "good"


async def test_what_is_no_fault_of_a_server_is_raised_as_it_is() -> None:
    async def wrong(seconds: float) -> str:
        raise KeyError("mine")

    async with client_of() as client:
        with pytest.raises(KeyError, match="mine"):
            await client.call(wrong, safe=True)
        with pytest.raises(ValueError):
            await client.request("GET", "http://", safe=True)


async def test_cancellation_is_not_swallowed(server: Start) -> None:
    here = await server(hangs)
    async with client_of() as client:
        asking = asyncio.create_task(ask(client, here))
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_client_that_is_closed_between_two_attempts_raises_a_fault(server: Start) -> None:
    """At the end of a run, when calls of cancelled trajectories are still asked again."""
    here = await server(*[says(503)] * 9)
    client = RemoteClient("the server", RemoteOptions())
    asking = asyncio.create_task(ask(client, here))
    while not here.asked:
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(RemoteUnavailable, match=r"status 503|the client is closed"):
        await asking


def test_one_client_in_two_event_loops_one_after_the_other() -> None:
    client = RemoteClient("the server", RemoteOptions())

    async def once() -> str:
        here = FaultyServer([says(200, "good")])
        await here.start()
        try:
            return await ask(client, here)
        finally:
            await client.close()
            await here.stop()

    assert [asyncio.run(once()) for _ in range(2)] == ["good", "good"]


async def test_the_environments_proxy_is_not_asked_and_named_where_a_server_elsewhere_is_not_reached(
    server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await server(says(200, "good"))
    for name in ("http_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://me:secret@127.0.0.1:9")
    async with client_of(attempts=1) as client:
        assert await ask(client, here) == "good"
        here.handlers = [says(500)]
        with pytest.raises(RemoteUnavailable) as failed:
            await ask(client, here)
        assert "proxy" not in str(failed.value), "this machine's own"
        with pytest.raises(RemoteUnavailable) as failed:
            await client.request("GET", "http://no-such-host.invalid/", safe=True)
    named = "http_proxy=http://127.0.0.1:9, https_proxy=http://127.0.0.1:9"
    assert_names(failed.value, f"({named})", "key `proxy`")


async def test_a_server_is_asked_by_the_proxy_that_the_key_names(
    server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await server(says(200, "by proxy"), says(407, "who are you"))
    monkeypatch.setenv("SITE_PROXY", proxy.url.replace("//", "//me:secret@").rstrip("/"))
    async with client_of(proxy="SITE_PROXY", attempts=2) as client:
        answer = await client.request("GET", "http://shop.invalid/cups?n=1", safe=True)
        assert answer.body == b"by proxy"
        (asked,) = proxy.asked
        assert (asked.method, str(asked.url)) == ("GET", "http://shop.invalid/cups?n=1")
        assert asked.headers["Proxy-Authorization"].startswith("Basic ")
        # That server has no CONNECT, and refuses it with 404.
        for url, status, tries in (("http://shop.invalid/", 407, ""), ("https://shop.invalid/", 404, " (2 attempts)")):
            with pytest.raises(RemoteUnavailable) as failed:
                await client.request("GET", url, safe=True)
            assert_names(failed.value, status, tries, f"http://127.0.0.1:{proxy.port}")
    assert len(proxy.asked) == 2, "what refuses the credentials is asked once"
    await proxy.stop()
    async with client_of(proxy=f"http://127.0.0.1:{proxy.port}", attempts=1) as client:
        with naming(RemoteUnavailable, proxy.port, f"http://127.0.0.1:{proxy.port}"):
            await client.request("GET", "http://shop.invalid/", safe=True)
    with pytest.raises(ConfigError, match="the server: proxy: expected http://HOST:PORT"):
        RemoteClient("the server", RemoteOptions(proxy="ftp://x"))
