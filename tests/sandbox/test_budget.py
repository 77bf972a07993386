"""What all runs share: memory, places, sessions; and the time that a request gives itself to begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from sandbox.launch import SandboxFault
from sandbox.limits import MIB, Limits
from sandbox.pool import Command, Job, Pool
from sandbox.tiers import Tier
from tests.naming import naming
from tests.sandbox.servers import Server, running
from tests.waiting import until

OPTIONS = ("--total-memory-mb", "1600", "--memory-mb", "256", "--max-memory-mb", "4096", "--concurrency", "4")
CAPS = ("--client-concurrency", "3", "--client-sessions", "2", "--sessions", "8")
GROW = "import threading, time\ndef grow():\n    time.sleep(0.2)\n    global x; x = bytearray(b'1') * (100 << 20)\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(None, options=(*OPTIONS, *CAPS)) as up:
        yield up


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as one:
        yield one


async def health(client: httpx.AsyncClient) -> dict[str, Any]:
    return dict((await client.get("/health")).json())


async def run(client: httpx.AsyncClient, code: str, who: str = "a", **more: Any) -> httpx.Response:
    body = {"code": code, "language": "python", **more}
    return await client.post("/run_code", json=body, headers={"x-client-id": who})


async def cell(client: httpx.AsyncClient, code: str, who: str = "a", **headers: str) -> httpx.Response:
    body = {"code": code, "session_id": "s"}
    return await client.post("/run_session", json=body, headers={"x-client-id": who, **headers})


async def close(client: httpx.AsyncClient, who: str = "a") -> None:
    assert (await client.delete("/sessions/s", headers={"x-client-id": who})).json() == {"closed": True}


async def test_runs_wait_for_memory(client: httpx.AsyncClient) -> None:
    tasks = [
        asyncio.create_task(run(client, "import time; time.sleep(0.3)", str(place), memory_limit_MB=700))
        for place in range(6)
    ]
    seen = []
    while not all(task.done() for task in tasks):
        seen.append(await health(client))
        await asyncio.sleep(0.02)
    assert [task.result().json()["status"] for task in tasks] == ["Success"] * 6
    assert max(state["running"] for state in seen) == 2
    assert max(state["reserved_memory_bytes"] for state in seen) == 1400 * MIB
    assert seen[0]["total_memory_bytes"] == 1600 * MIB
    assert (await health(client))["reserved_memory_bytes"] == 0
    refused = await run(client, "", memory_limit_MB=1601)
    assert refused.status_code == 422 and "at most 1600" in refused.text


async def test_a_session_holds_its_limit_only_while_a_cell_runs(client: httpx.AsyncClient) -> None:
    state = await health(client)
    first = (await cell(client, "x = bytearray(b'1') * (50 << 20)")).json()
    assert first["created"] and first["status"] == "Success", first
    held = (await health(client))["reserved_memory_bytes"]
    if state["tier"] == "namespaces+cgroup":
        assert 50 * MIB < held < 160 * MIB
        second = (await cell(client, "y = bytearray(b'1') * (120 << 20)\nlen(x) + len(y)")).json()
        assert (second["created"], second["result"]) == (False, str(170 << 20)), second
        assert 170 * MIB < (await health(client))["reserved_memory_bytes"] <= 256 * MIB
    else:
        assert held == 256 * MIB
    await close(client)
    assert (await health(client))["reserved_memory_bytes"] == 0


async def test_a_session_cannot_grow_while_it_holds_little(client: httpx.AsyncClient) -> None:
    if (await health(client))["tier"] != "namespaces+cgroup":
        pytest.skip("only control groups count a session's memory")
    assert (await cell(client, GROW + "threading.Thread(target=grow, daemon=True).start()")).json()["alive"]

    async def freed() -> bool:
        return bool((await health(client))["reserved_memory_bytes"] == 0)

    await until(freed)
    left = (await cell(client, "1")).json()
    assert (left["created"], left["alive"], left["run_result"]["limits"]) == (False, False, ["memory"])
    assert (await cell(client, "1")).json()["created"]
    await close(client)


async def test_a_request_that_has_not_begun_in_time_never_runs(client: httpx.AsyncClient) -> None:
    assert (await cell(client, "x = 0")).json()["alive"]
    late = {"x-request-timeout-ms": "150"}
    hold = "import time; time.sleep(1.2)"
    holders = [asyncio.create_task(run(client, hold, who, memory_limit_MB=64)) for who in "bbcc"]
    while (await health(client))["running"] < 4:
        await asyncio.sleep(0.01)
    dropped = await cell(client, "x += 1", **late)
    assert dropped.status_code == 504 and "x-request-timeout-ms" in dropped.text
    assert (await health(client))["waiting"] == 0
    await asyncio.gather(*holders)
    assert (await cell(client, "x")).json()["result"] == "0"
    busy = asyncio.create_task(cell(client, "import time; time.sleep(1)"))
    await asyncio.sleep(0.2)
    assert (await cell(client, "x += 1", **late)).status_code == 504  # another cell of the session was before it
    assert (await busy).json()["alive"]
    assert (await cell(client, "x", **{"x-request-timeout-ms": "60000"})).json()["result"] == "0"
    assert (await cell(client, "x", **{"x-request-timeout-ms": "soon"})).status_code == 422
    await close(client)


async def test_clients_have_sessions_of_their_own_and_caps(client: httpx.AsyncClient) -> None:
    assert (await cell(client, "x = 'of a'", "a")).json()["created"]
    assert (await cell(client, "x", "b")).json()["error"]["ename"] == "NameError"
    assert (await client.delete("/sessions/s", headers={"x-client-id": "c"})).json() == {"closed": False}
    assert (await cell(client, "x", "a")).json()["result"] == "'of a'"
    body, header = {"code": "1", "session_id": "t"}, {"x-client-id": "a"}
    assert (await client.post("/run_session", json=body, headers=header)).status_code == 200
    third = await client.post("/run_session", json={**body, "session_id": "u"}, headers=header)
    assert third.status_code == 429 and "of this client" in third.text and third.headers["retry-after"]
    assert (await client.delete("/sessions/t", headers=header)).json() == {"closed": True}
    for who in "ab":
        await close(client, who)


async def test_sessions_leave_memory_to_programs(client: httpx.AsyncClient) -> None:
    body = {"code": "1", "session_id": "s", "memory_limit_MB": 790}
    assert (await client.post("/run_session", json=body)).status_code == 200
    refused = await client.post("/run_session", json={**body, "session_id": "t"})
    assert refused.status_code == 429 and "sessions hold" in refused.text
    never = await client.post("/run_session", json={**body, "session_id": "t", "memory_limit_MB": 801})
    assert never.status_code == 422 and "at most 800" in never.text
    assert (await client.post("/run_session", json=body)).json()["created"] is False
    assert (await client.delete("/sessions/s")).json() == {"closed": True}


async def test_who_is_killed_for_others_memory_is_not_blamed() -> None:
    pool = Pool(Tier.CGROUP)
    try:
        await pool.start()
    except SandboxFault as fault:
        pytest.skip(str(fault))
    assert pool.groups is not None
    program = b"x = bytearray(b'1') * (100 << 20)\nprint(len(x))"
    try:
        job = Job([Command(None, 20.0)], {"main.py": program})
        assert (await pool.run(job, Limits(memory_bytes=200 * MIB))).commands[0].code == 0
        pool.groups.limit_memory(64 * MIB)
        with naming(SandboxFault, "all runs"):
            await pool.run(job, Limits(memory_bytes=200 * MIB))
        outcome = await pool.run(job, Limits(memory_bytes=50 * MIB))
        assert [str(limit) for limit in outcome.commands[0].limits] == ["memory"]
    finally:
        await pool.stop()
