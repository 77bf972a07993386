"""Sessions over HTTP, in the best tier that this machine holds: state, interrupts, ends, forged answers, caps."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.sandbox.servers import run
from tests.waiting import until


async def session(client: httpx.AsyncClient, name: str, code: str, **more: Any) -> dict[str, Any]:
    answer = await client.post("/run_session", json={"session_id": name, "code": code, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_session_keeps_its_state(client: httpx.AsyncClient) -> None:
    first = await session(client, "a", "x = 20\nopen('f', 'w').write('hi')", files={"data/d": "aGk="})
    assert (first["created"], first["alive"], first["status"], first["result"]) == (True, True, "Success", "2")
    second = await session(client, "a", "print(x)\nx * 2", fetch_files=["f", "data/d", "none"])
    assert (second["created"], second["result"], second["run_result"]["stdout"]) == (False, "40", "20\n")
    assert second["files"] == {"f": "aGk=", "data/d": "aGk="} and set(second["refused_files"]) == {"none"}
    other = await session(client, "b", "x")
    assert other["error"]["ename"] == "NameError" and other["status"] == "Failed"
    for name in "ab":
        assert (await client.delete(f"/sessions/{name}")).json() == {"closed": True}
    assert (await session(client, "a", "1"))["created"]
    await client.delete("/sessions/a")


async def test_a_cell_that_hangs_is_interrupted_and_one_that_will_not_end_ends_the_session(
    client: httpx.AsyncClient,
) -> None:
    await session(client, "c", "x = 1")
    hung = await session(client, "c", "while True: pass", run_timeout=0.3)
    assert (hung["alive"], hung["run_result"]["status"], hung["error"]["ename"]) == (
        True,
        "TimeLimitExceeded",
        "KeyboardInterrupt",
    )
    assert (await session(client, "c", "x"))["result"] == "1"
    stubborn = (
        "import time\nwhile True:\n    try:\n        while True: time.sleep(0.01)\n    except KeyboardInterrupt: pass"
    )
    killed = await session(client, "c", stubborn, run_timeout=0.3)
    assert (killed["alive"], killed["run_result"]["limits"]) == (False, ["wall_time"])
    again = await session(client, "c", "x")
    assert again["created"] and again["error"]["ename"] == "NameError"
    await client.delete("/sessions/c")


async def test_a_session_that_dies_says_how(client: httpx.AsyncClient) -> None:
    left = await session(client, "d", "import os; os._exit(7)")
    assert (left["alive"], left["run_result"]["return_code"]) == (False, 7)
    program = "x = []\nwhile True: x.append(bytearray(b'1') * (8 << 20))"
    eaten = await session(client, "d", program, memory_limit_MB=96)
    tier = (await client.get("/health")).json()["tier"]
    if tier == "namespaces+cgroup":
        assert (eaten["alive"], eaten["run_result"]["limits"]) == (False, ["memory"])
    await client.delete("/sessions/d")


async def test_a_session_that_a_thread_ends_between_cells_says_so_at_the_next(client: httpx.AsyncClient) -> None:
    await session(client, "t", "import os, threading\nthreading.Timer(0.05, os._exit, (7,)).start()")
    await asyncio.sleep(1.0)  # meanwhile the server looks for dead sessions
    left = await session(client, "t", "print('not run')")
    assert (left["created"], left["alive"], left["run_result"]["return_code"]) == (False, False, 7)
    assert left["run_result"]["stdout"] == ""
    assert (await session(client, "t", "1"))["created"]
    await client.delete("/sessions/t")


async def test_a_session_that_is_closed_while_a_cell_runs_ends_the_cell(client: httpx.AsyncClient) -> None:
    running_cell = asyncio.create_task(session(client, "f", "import time; time.sleep(60)", run_timeout=60))

    async def begun() -> bool:
        return bool((await client.get("/health")).json()["running"])

    await until(begun)
    await asyncio.sleep(0.3)
    assert (await client.delete("/sessions/f")).json() == {"closed": True}
    ended = await running_cell
    assert (ended["status"], ended["alive"], ended["run_result"]["limits"]) == ("Failed", False, [])


GARBAGE = """
import json, os, struct, threading, time
answer = json.dumps({"result": "'forged'", "error": None, "files": {}, "refused": {}}).encode()
def garbage():
    for text in (b"x", b"\\0", bytes(16), b"\\xff" * 400, bytes(16) + b"\\1" + answer, b"\\1" + answer, answer,
                 struct.pack("!I", len(answer)) + answer, struct.pack("!I", 1 << 20) + b"{"):
        try: os.write(3, text)
        except OSError: pass
"""


async def test_what_a_program_writes_to_the_channel_is_no_answer_to_any_cell(client: httpx.AsyncClient) -> None:
    """Neither to its own cell, nor to a later one, nor does it shift answers: before, during and between cells."""
    first = await session(client, "e", GARBAGE + "garbage()\n'own'")
    assert (first["alive"], first["result"]) == (True, "'own'")
    for number in range(3):
        again = await session(client, "e", f"garbage()\n{number}")
        assert (again["alive"], again["created"], again["result"]) == (True, False, str(number))
    await session(client, "e", "threading.Timer(0.05, garbage).start()")
    await asyncio.sleep(0.3)
    assert (await session(client, "e", "time.sleep(0.1); 'late'"))["result"] == "'late'"
    child = "os.system('echo x 2>/dev/null >&3')"  # no other program has it
    assert (await session(client, "e", child))["result"] != "0"
    flood = await session(client, "e", "while True: garbage()", run_timeout=20)
    assert not flood["alive"] and flood["run_result"]["execution_time"] < 10
    await client.delete("/sessions/e")


FORGE = """
import json, os, sys
def say(answer):
    # The interpreter's own frame has the mark. Who runs in its process can read it, and be it.
    frame = sys._getframe()
    while "cell" not in frame.f_locals: frame = frame.f_back
    text = json.dumps(answer).encode()
    for start in range(0, len(text), 30_000):
        last = bytes([start + 30_000 >= len(text)])
        os.write(3, bytes.fromhex(frame.f_locals["cell"]["mark"]) + last + text[start : start + 30_000])
    os.read(3, 1 << 20)  # so that the next cell is never seen
"""


@pytest.mark.parametrize(
    ("answer", "alive"),
    [
        ({"files": {"../../etc/cron.d/x": "aGk=", "asked": "aGk="}, "refused": {"/etc": "no"}}, True),
        ({"files": {"asked": "not base64!"}}, False),
        ({"result": "x" * 2_000_000}, False),
        ({"error": {"ename": "E", "evalue": "x" * 200_000, "traceback": []}}, False),
        ({"files": {"asked": 1}}, False),
    ],
)
async def test_a_session_cannot_answer_what_nobody_asked(
    client: httpx.AsyncClient, answer: dict[str, Any], alive: bool
) -> None:
    whole = {"result": None, "error": None, "files": {}, "refused": {}, **answer}
    code = FORGE + f"import json\nsay(json.loads({json.dumps(whole)!r}))"
    forged = await session(client, "g", code, fetch_files=["asked"])
    assert forged["alive"] is alive
    assert (forged["files"], forged["refused_files"]) == (({"asked": "aGk="} if alive else {}), {})
    await client.delete("/sessions/g")


async def test_only_regular_files_of_a_size_leave_a_run(client: httpx.AsyncClient) -> None:
    code = (
        "import os\nos.mkfifo('fifo'); os.mkdir('deep')\n"
        "for name in ('first', 'second'):\n    open(name, 'w').truncate(40 << 20)\n"
    )
    refused = ["fifo", "/dev/zero", "/proc/self/fd/3", "deep", "second"]
    stateless = await run(client, code, fetch_files=["first", *refused])
    kept = await session(client, "h", code, fetch_files=["first", *refused])
    for answer in (stateless, kept):
        assert (answer["status"], set(answer["files"]), set(answer["refused_files"])) == (
            "Success",
            {"first"},
            set(refused),
        )
    await client.delete("/sessions/h")


async def test_sessions_are_capped_and_end_when_idle(client: httpx.AsyncClient) -> None:
    for name in ("i", "j", "k"):
        await session(client, name, "1")
    full = await client.post("/run_session", json={"session_id": "l", "code": "1"})
    assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
    health = (await client.get("/health")).json()
    assert health["sessions"] == 3
    if health["tier"] == "namespaces+cgroup":
        assert 3 << 20 < health["session_memory_bytes"] < 300 << 20
    for _ in range(80):
        if (await client.get("/health")).json()["sessions"] == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("idle sessions live on")
