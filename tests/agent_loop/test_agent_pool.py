"""Agents that live on: what they earn, how they die and are started again, and who may connect."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.agents import session_queue
from agentrl.agents.agent import AgentOptions
from agentrl.errors import CodeError, ConfigError
from agentrl.openai_api.agent_loop import OpenAIProxyLoop
from agentrl.openai_api.endpoint import Endpoint
from agentrl.trajectory import Status, Trajectory
from tests.agent_loop.conftest import Bench, sample
from tests.agent_loop.scripted_engine import Script
from tests.naming import Names, assert_names, naming
from tests.waiting import until

SAMPLE = sample("openai_proxy")

PROGRAM = """
import json, os, signal, sys, threading, time, traceback, urllib.request

def post(url, value, read=json.load):
    request = urllib.request.Request(url, json.dumps(value).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return read(answer)

def joined(stream):
    events = [json.loads(line[6:]) for line in stream if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])

def ask(session, messages):
    "Ask, and have every other answer streamed."
    body = {"model": session["model"], "messages": messages}
    url = session["base_url"] + "/chat/completions"
    if len(messages) % 4 == 1:
        return post(url, {**body, "stream": True}, joined)
    return post(url, body)["choices"][0]["message"]["content"]

def act(session):
    try:
        result = solve(session)
    except Exception:
        result = {"error": traceback.format_exc()}
    try:
        post(session["report_url"] + "/result", result)
    except OSError:
        pass  # The trainer has ended the session.

def main():
    open(__file__ + ".starts", "a").write("x")
    token = {"authorization": "Bearer " + os.environ["AGENTRL_TOKEN"]}
    request = urllib.request.Request(os.environ["AGENTRL_URL"] + "/v1/sessions", headers=token)
    for line in urllib.request.urlopen(request):
        if line.strip():
            threading.Thread(target=act, args=(json.loads(line),), daemon=True).start()

def once(name):
    "Say whether this is the first process that asks."
    try:
        os.close(os.open(__file__ + name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
"""


def pool(tmp_path: Path, body: str, **more: Any) -> AgentOptions:
    """A pool of a program with a function `solve(session)`."""
    (tmp_path / "program.py").write_text(f"{PROGRAM}\n{body}\nmain()\n")
    return AgentOptions(start="pool", command=[sys.executable, "-S", str(tmp_path / "program.py")], **more)


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "program.py.starts").read_text())


SOLVE = 'def solve(session):\n    ask(session, session["sample"]["prompt"])\n    return {"reward": 0.5}\n'


@pytest.fixture
async def run(bench: Callable[..., Bench]) -> AsyncIterator[Callable[..., Any]]:
    """Run a row `n` times with an agent; the loop lives until the test ends."""
    loops: list[OpenAIProxyLoop] = []

    async def go(script: Script, options: AgentOptions | None, n: int = 1, **keys: Any) -> list[Trajectory]:
        made = bench(script, trajectory_timeout=keys.pop("trajectory_timeout", 100.0), **keys)
        if options is not None:
            loops.append(OpenAIProxyLoop(options))
        made.scheduler.loops = {"openai_proxy": loops[-1]}
        return await made.run(SAMPLE, n)

    go.loops = loops  # type: ignore[attr-defined]
    yield go
    for loop in loops:
        await loop.close()


def right(session: str, turn: int) -> str:
    return "#### 5"


async def test_processes_take_one_session_after_another_and_mix_none(run: Any, tmp_path: Path) -> None:
    body = """
def solve(session):
    first = ask(session, [{"role": "user", "content": "one"}])
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first}]
    second = ask(session, [*said, {"role": "user", "content": "two"}])
    assert first == second, (first, second)
    return {"seen": int(second.split()[0]), "reward": 0.5}
"""
    options = pool(tmp_path, body, processes=2, sessions_at_once=4)
    ended = await run(lambda session, turn: f"{int(session[2:].split('.')[0])} #### 5", options, n=24)
    assert [t.failure for t in ended] == [None] * 24
    assert [t.score_extra["seen"] for t in ended] == list(range(24)), "each is the policy's of its own trajectory"
    assert {len(t.transcripts) for t in ended} == {1} and {t.metrics["openai_calls"] for t in ended} == {2.0}
    assert {t.score for t in ended} == {1.0} and {t.turns[-1].reward for t in ended} == {0.5}
    begun = sum(t.metrics["agent_starts"] for t in ended)
    await until(lambda: starts(tmp_path) == begun)  # one process may do all before the other has begun
    assert begun <= 2
    assert all(t.metrics["agent_start_cpu_seconds"] >= 0 for t in ended), "of a fast start the clock's ticks show 0"
    (again,) = await run(lambda session, turn: "0 #### 5", None)
    assert (again.metrics["agent_starts"], starts(tmp_path)) == (0.0, 2), "a later step starts nothing"


@pytest.mark.parametrize(
    ("solve", "failure", "retries"),
    [
        ('raise ValueError("bad luck")', "AgentError: agent: Traceback .*ValueError: bad luck", 0),
        ('raise ConnectionError("closed")', "AgentFailed: agent: Traceback .*ConnectionError: closed", 2),
        ('return {"error": "no place"}', "AgentFailed: agent: no place", 2),
        ('raise ValueError("long" * 20_000)', "AgentError: agent: Traceback .*ValueError: longlong", 0),
        ('return {"reward": "much"}', "AgentError: agent: it returned reward='much'", 0),
        ("return [1]", "AgentError: agent: it returned list", 0),
        ("return {}", "CodeError: .*it made no successful call", 0),
    ],
)
async def test_a_result_says_whether_the_agent_or_something_that_it_asked_failed(
    run: Any, tmp_path: Path, solve: str, failure: str, retries: int
) -> None:
    task = run(right, pool(tmp_path, f"def solve(session):\n    {solve}\n"))
    if failure.startswith("CodeError"):
        with pytest.raises(CodeError, match=failure.removeprefix("CodeError: ")):
            await task
    else:
        (t,) = await task
        assert (t.status, t.score, t.metrics["retries"]) == (Status.FAILED, None, retries)
        assert starts(tmp_path) == 1
        assert re.match(failure, t.failure.replace("\n", " ")), t.failure


async def test_a_death_is_a_fault_of_its_sessions_and_the_process_is_started_again(run: Any, tmp_path: Path) -> None:
    body = """
def solve(session):
    ask(session, session["sample"]["prompt"])
    if once("died"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {}
"""
    ended = await run(right, pool(tmp_path, body, sessions_at_once=8), n=8)
    assert [t.score for t in ended] == [1.0] * 8
    assert starts(tmp_path) == 2 == sum(t.metrics["agent_starts"] for t in ended)
    assert 1 <= sum(t.metrics.get("retries/AgentFailed", 0) for t in ended) <= 8


async def test_a_process_that_dies_by_an_error_of_its_own_is_an_error(run: Any, tmp_path: Path) -> None:
    body = "def solve(session):\n    raise AssertionError\n\nact = lambda session: 1 / 0\n"
    body += "threading.Thread.start = lambda thread: thread.run()"
    (t,) = await run(right, pool(tmp_path, body))
    assert t.failure is not None and t.failure.startswith("AgentError: agent command ")
    assert "ZeroDivisionError" in t.failure and (t.metrics["retries"], starts(tmp_path)) == (0, 1)


@pytest.mark.parametrize("ending", ["raise KeyError('key')", "sys.exit(3)", "gone"])
async def test_a_pool_that_cannot_start_ends_the_run_after_few_starts(run: Any, tmp_path: Path, ending: str) -> None:
    options = pool(tmp_path, f"open(__file__ + '.starts', 'a').write('x')\n{ending}")
    if ending == "gone":
        options = options.model_copy(update={"command": ["/no/such/agent"]})
    with pytest.raises(CodeError) as told:
        await run(right, options, n=12)
    wanted = {"sys.exit(3)": "status 3", "gone": "/no/such/agent"}.get(ending, "KeyError: 'key'")
    assert_names(told.value, "result")
    assert wanted in str(told.value)
    assert ending == "gone" or starts(tmp_path) == 3


async def test_a_process_that_ignores_the_end_of_its_session_is_replaced(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_queue, "LEFT_SECONDS", 0.1)
    monkeypatch.setattr(session_queue, "TICK_SECONDS", 0.05)
    body = SOLVE.replace("    ask", '    if once("hangs"):\n        time.sleep(3600)\n    ask')
    options = pool(tmp_path, body)
    (lost,) = await run(right, options, trajectory_timeout=3.0)
    assert lost.status is Status.TIMEOUT
    (t,) = await run(right, None)
    assert (t.score, t.turns[-1].reward, starts(tmp_path)) == (1.0, 0.5, 2)


async def test_a_closed_run_leaves_no_process(run: Any, tmp_path: Path) -> None:
    body = SOLVE.replace("    return", '    open(__file__ + ".pid", "w").write(str(os.getpid()))\n    return')
    await run(right, pool(tmp_path, body))
    pid = int((tmp_path / "program.py.pid").read_text())
    os.kill(pid, 0)
    await run.loops[-1].close()
    await until(lambda: not Path(f"/proc/{pid}").exists())


KILLS = 4


@pytest.mark.parametrize("seed", range(KILLS))
@pytest.mark.slice(1, "kill")
async def test_nothing_is_lost_doubled_or_mixed_where_processes_are_killed(run: Any, tmp_path: Path, seed: int) -> None:
    body = """
def solve(session):
    talk = []
    for turn in range(3):
        talk.append({"role": "user", "content": str(turn)})
        talk.append({"role": "assistant", "content": ask(session, talk)})
    return {"seen": int(talk[-1]["content"].split()[0])}
open(f"{__file__}.{os.getpid()}.pid", "w")
"""
    options = pool(tmp_path, body, processes=2, sessions_at_once=8)
    rng, calls = random.Random(seed), 0
    moments = rng.sample(range(10, 90), 4)

    def script(session: str, turn: int) -> str:
        nonlocal calls
        calls += 1
        if calls in moments:
            files = sorted(tmp_path.glob("*.pid"))
            for file in rng.sample(files, min(len(files), rng.choice([1, 2]))):
                file.unlink()
                os.kill(int(file.name.split(".")[-2]), signal.SIGKILL)
        return f"{int(session[2:].split('.')[0])} #### 5"

    ended = await run(script, options, n=32, max_retries=50)
    assert [t.uid for t in ended] == [f"t/{k}" for k in range(32)]
    assert [(t.score, t.score_extra["seen"]) for t in ended] == [(1.0, float(k)) for k in range(32)]
    assert {len(t.transcripts) for t in ended} == {1} and {len(t.turns) for t in ended} == {5}
    assert starts(tmp_path) > 2, "the first kill found a process, and sessions waited"


TOKEN = "a-token-of-this-run"


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> AgentOptions:
    """Options of remote agents, at a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    return AgentOptions(start="remote", port=port, token_env="MY_TOKEN", sessions_at_once=2)


async def test_remote_agents_connect_by_a_token(run: Any, remote: AgentOptions) -> None:
    url, headers = f"http://127.0.0.1:{remote.port}", {"authorization": f"Bearer {TOKEN}"}
    task, bases = asyncio.create_task(run(right, remote, n=4)), []
    async with httpx.AsyncClient(timeout=60) as client:
        await until(lambda: bool(run.loops and run.loops[-1]._endpoint and run.loops[-1]._endpoint.done()))
        for wrong in ({}, {"authorization": "Bearer nonsense"}, {"authorization": TOKEN}):
            answer = await client.get(f"{url}/v1/sessions", headers=wrong)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        async with client.stream("GET", f"{url}/v1/sessions", headers=headers) as lines:
            given = [json.loads(line) async for line in _some(lines, 2)]
        # It has left, with two sessions: they are tried again.
        async with client.stream("GET", f"{url}/v1/sessions", headers=headers) as lines:
            async for line in lines.aiter_lines():
                if not line:
                    continue
                session = json.loads(line)
                bases.append(base := session["base_url"])
                report = session["report_url"]
                body = {"model": "m", "max_tokens": 50, "messages": session["sample"]["prompt"]}
                assert (await client.post(f"{base}/messages", json=body)).status_code == 200
                assert (await client.post(f"{base}/result", json={"reward": 9})).status_code == 403
                assert (await client.post(f"{report}/result", json={"reward": 1})).json() == {"ended": True}
                if len(bases) == 4:
                    break
        ended = await task
        assert len({*bases, *(session["base_url"] for session in given)}) == 6
        assert [(t.score, t.turns[-1].reward) for t in ended] == [(1.0, 1.0)] * 4
        assert sum(t.metrics["retries"] for t in ended) == 2
        late = await client.post(f"{report}/result", json={"reward": 1})
        assert (late.status_code, late.json()["error"]["code"]) == (404, "session_not_found")
        late = await client.post(f"{bases[0]}/messages", json=body)
        assert (late.status_code, late.json()["type"]) == (404, "error"), "in Anthropic's form"


async def _some(lines: httpx.Response, count: int) -> AsyncIterator[str]:
    async for line in lines.aiter_lines():
        if line:
            yield line
            count -= 1
        if not count:
            return


async def test_a_port_that_another_run_has_is_an_error_that_names_its_key(remote: AgentOptions) -> None:
    first, second = (Endpoint(remote.host, remote.port) for _ in range(2))
    await first.start()
    with naming(ConfigError, f"openai_proxy.port={remote.port}"):
        await second.start()
    await first.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "pool"}, ("start=pool", "openai_proxy.command", "openai_proxy.target")),
        ({"start": "pool", "target": "a:b"}, ("start=pool", "openai_proxy.command", "openai_proxy.target")),
        ({"start": "function", "command": ["a"]}, ("start=function", "openai_proxy.target")),
        ({"start": "process", "target": "a:b"}, ("start=process", "openai_proxy.command")),
        ({"start": "remote", "command": ["a"]}, ("target", "command")),
        ({"start": "remote", "port": 1}, ("openai_proxy.token_env", "openai_proxy.port")),
        ({"start": "remote", "port": 1, "token_env": "NONE_SUCH"}, "NONE_SUCH"),
        ({"start": "remote", "port": 1, "token_env": "SHORT"}, "found 3"),
        ({"start": "pol"}, ("'pol'", "'pool'", "unknown")),
    ],
)
def test_a_start_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: Names
) -> None:
    monkeypatch.setenv("SHORT", "abc")
    with naming(ConfigError, message):
        OpenAIProxyLoop(AgentOptions(**options)).check()
