"""Every attack, against real servers, as root and as an ordinary user, in every tier. The server is as it was after.
Sessions and notebooks too.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox.limits import Limit
from tests.sandbox.attacks import ATTACKS, ONLY_NAMESPACES, ORDINARY, ORDINARY_NETWORK, SESSION_ATTACK, Attack
from tests.sandbox.servers import NOBODY, Server, can_run_as_nobody, running
from tests.sandbox.test_sessions import FORGE, GARBAGE

SETTINGS = [
    pytest.param(("namespaces+cgroup", {}), id="root-cgroup"),
    pytest.param(("landlock+uid", {}), id="root-landlock"),
    pytest.param(("namespaces+cgroup", {"nobody": True, "delegated": True}), id="nobody-cgroup"),
    pytest.param(("namespaces", {"nobody": True}), id="nobody-namespaces"),
    pytest.param(("landlock", {"nobody": True}), id="nobody-landlock"),
]
pytestmark = pytest.mark.skipif(not can_run_as_nobody(), reason="needs root, to be root and to become nobody")


ROOM = 90.0
"""Seconds for programs that their wall time has no part in stopping."""


@contextlib.contextmanager
def targets(nobody: bool) -> Iterator[dict[str, Any]]:
    """What the host has to attack."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.chmod(folder, 0o777)
        Path(folder, "secret").write_text("secret")
        os.chmod(Path(folder, "secret"), 0o666)
        loopback = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        unix.bind(f"{folder}/socket")
        os.chmod(f"{folder}/socket", 0o777)
        abstract.bind(f"\0agentrl-test-{os.getpid()}")
        for each in (unix, abstract):
            each.listen()
        user = NOBODY if nobody else None
        victim = stack.enter_context(
            subprocess.Popen(["sleep", "600"], user=user, group=user, extra_groups=[] if nobody else None)
        )
        try:
            yield {
                "PID": victim.pid,
                "PORT": loopback.getsockname()[1],
                "SOCKET": f"{folder}/socket",
                "ABSTRACT": f"agentrl-test-{os.getpid()}",
                "SECRET": f"{folder}/secret",
                "OPEN_FOLDER": folder,
            }
            for listener in (loopback, unix, abstract):
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.accept()
            assert victim.poll() is None, "a process of the host was killed"
            assert sorted(path.name for path in Path(folder).iterdir()) == ["secret", "socket"]
            assert Path(folder, "secret").read_text() == "secret"
        finally:
            victim.kill()


async def launch(
    client: httpx.AsyncClient, attack: Attack, given: dict[str, Any], gate: asyncio.Semaphore
) -> str | None:
    """What is wrong with the sandbox, after one attack."""
    prefix = "".join(f"{name} = {value!r}\n" for name, value in given.items()) if attack.language == "python" else ""
    seconds = attack.seconds if Limit.WALL_TIME in attack.limits else ROOM
    body = {"code": prefix + attack.code, "language": attack.language, "run_timeout": seconds}
    body["fetch_files"] = [
        "fetched",
        "deep/etc/shadow",
        "fifo",
        "/etc/shadow",
        "../../../etc/shadow",
        "/tmp/../etc/shadow",
    ]
    async with gate:
        started = time.monotonic()
        answer = (await client.post("/run_code", json=body)).raise_for_status().json()
        took = time.monotonic() - started
    if answer["status"] == "SandboxError":
        return f"{attack.name}: {answer['message']}"
    result = answer["run_result"]
    fell = []
    if took > seconds + 30:
        fell.append(f"took {took:.1f} s")
    if answer["files"]:
        fell.append(f"fetched {list(answer['files'])}")
    held = result["stdout"].rstrip().endswith("held") or (attack.crash and result["return_code"] == -11)
    if not held and not set(attack.limits) & set(result["limits"]):
        said = (result["stdout"][-400:], result["stderr"][-400:], result["limits"], result["return_code"])
        fell.append(f"said {said}")
    return f"{attack.name}: {'; '.join(fell)}" if fell else None


async def settled(server: Server, processes: set[int]) -> set[int]:
    """Processes more than there were, once the kernel had its moment."""
    for _ in range(60):
        if not (more := server.processes() - processes):
            break
        await asyncio.sleep(0.05)
    return more


@dataclass(frozen=True, slots=True)
class Setting:
    server: Server
    tier: str
    nobody: bool


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    tier, how = request.param
    options = ("--memory-mb", "256", "--disk-mb", "32", "--concurrency", "6")
    with running(tier, options=options, **how) as server:
        yield Setting(server, tier, bool(how.get("nobody")))


@pytest.mark.slice(1, "hostile")
async def test_sessions_and_notebooks_work_and_are_held(setting: Setting) -> None:
    server = setting.server
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def cell(name: str, code: str, **more: Any) -> dict[str, Any]:
            answer = await client.post("/run_session", json={"session_id": name, "code": code, **more})
            return dict(answer.raise_for_status().json())

        processes = server.processes()
        first = await cell("a", "import numpy\nx = 20\nprint('out')", files={"in/f": "aGk="})
        assert (first["created"], first["alive"], first["run_result"]["stdout"]) == (True, True, "out\n")
        second = await cell("a", "open('g', 'w').write(open('in/f').read()); x * 2", fetch_files=["g", "none"])
        assert (second["created"], second["result"], second["files"]) == (False, "40", {"g": "aGk="})
        assert set(second["refused_files"]) == {"none"}
        assert (await cell("b", "x"))["error"]["ename"] == "NameError"
        hung = await cell("a", "while True: pass", run_timeout=0.3)
        assert hung["alive"] and hung["run_result"]["limits"] == ["wall_time"]
        assert (await cell("a", "x"))["result"] == "20"
        eaten = await cell("b", "y = []\nwhile True: y.append(bytearray(b'1') * (8 << 20))", run_timeout=20)
        assert not eaten["alive"] or eaten["error"]["ename"] == "MemoryError"
        with targets(setting.nobody) as given:
            assert (await cell("c", SESSION_ATTACK.format(**given)))["result"] == "[]"
        for name in "abc":
            await client.delete(f"/sessions/{name}")
        body = {"cells": ["a = 6", "print(a)\na * 7", "1 / 0"], "total_timeout": 30}
        answer = (await client.post("/run_jupyter", json=body)).json()
        assert (answer["status"], len(answer["cells"])) == ("Success", 3)
        assert (answer["cells"][1]["display"], answer["cells"][1]["stdout"]) == ([{"text/plain": "42"}], "6\n")
        assert await settled(server, processes) == set()


DRAWN = """
import random, secrets, numpy, sympy
prime, dummy = sympy.randprime(10**20, 10**21), sympy.srepr(sympy.Dummy("x"))
(random.random(), secrets.token_hex(), numpy.random.rand(), prime, dummy)
"""


@pytest.mark.slice(2, "hostile")
async def test_no_answer_is_forged_and_no_draw_repeats(setting: Setting) -> None:
    """What test_sessions and test_reseed try in the best tier, in each."""
    async with httpx.AsyncClient(base_url=setting.server.url, timeout=60) as client:

        async def cell(name: str, code: str, **more: Any) -> dict[str, Any]:
            answer = await client.post("/run_session", json={"session_id": name, "code": code, **more})
            return dict(answer.raise_for_status().json())

        assert (await cell("d", GARBAGE + "garbage()\n'own'"))["result"] == "'own'"
        for number in range(3):
            again = await cell("d", f"garbage()\n{number}")
            assert (again["alive"], again["created"], again["result"]) == (True, False, str(number))
        flood = await cell("d", "while True: garbage()", run_timeout=20)
        assert not flood["alive"] and flood["run_result"]["execution_time"] < 15
        forged = {"result": None, "error": None, "files": {"../x": "aGk=", "asked": "aGk="}, "refused": {"/etc": "no"}}
        code = FORGE + f"import json\nsay(json.loads({json.dumps(forged)!r}))"
        found = await cell("e", code, fetch_files=["asked"])
        assert (found["alive"], found["files"], found["refused_files"]) == (True, {"asked": "aGk="}, {})
        drawn = [(await cell(name, DRAWN))["result"] for name in ("f", "g")]
        program = {"code": f"{DRAWN.rstrip()}\n", "language": "python", "show_last_expression": True}
        for _ in range(2):
            run = (await client.post("/run_code", json=program)).raise_for_status().json()["run_result"]
            assert run["return_code"] == 0, run["stderr"]
            drawn.append(run["stdout"].strip())
        for name in "defg":
            await client.delete(f"/sessions/{name}")
    values = [ast.literal_eval(text) for text in drawn]
    assert all(len(set(column)) == len(values) for column in zip(*values, strict=True)), values


@pytest.mark.slice(2, "hostile")
@pytest.mark.timeout(600)
async def test_all_attacks_are_stopped(setting: Setting) -> None:
    server, tier = setting.server, setting.tier
    chosen = [attack for attack in ATTACKS if tier in attack.tiers]
    assert len(chosen) >= 30
    with targets(setting.nobody) as given:
        async with httpx.AsyncClient(base_url=server.url, timeout=2 * ROOM) as client:
            health = (await client.get("/health")).json()
            assert health["tier"] == tier
            processes, memory = server.processes(), server.memory()
            gate = asyncio.Semaphore(6)
            fallen = await asyncio.gather(*(launch(client, attack, given, gate) for attack in chosen))
            assert [fault for fault in fallen if fault] == []
            good = (
                await client.post("/run_code", json={"code": "import numpy; print(6 * 7)", "language": "python"})
            ).json()
            assert good["run_result"]["stdout"] == "42\n"
            for code in (ORDINARY, *([ORDINARY_NETWORK] if tier in ONLY_NAMESPACES else [])):
                body = {"code": code, "language": "python", "run_timeout": ROOM}
                ordinary = (await client.post("/run_code", json=body)).json()
                assert ordinary["run_result"]["stdout"] == "held\n", ordinary
            assert await settled(server, processes) == set()
            after = (await client.get("/health")).json()
            assert (after["running"], after["waiting"]) == (0, 0)
            assert server.memory() < memory + (24 << 20)
        assert "Traceback" not in server.log.read_text()
