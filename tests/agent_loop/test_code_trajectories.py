"""Whole trajectories with the code interpreter, a real sandbox server, and a policy that follows a script: in both
styles, many at once, and with the server killed among them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status
from tests.agent_loop.conftest import Bench, call, sample
from tests.agent_loop.scripted_engine import Script
from tests.sandbox.servers import PROJECT, Server, running

MakeBench = Callable[..., Bench]
MANY = 64


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(None) as up:
        yield up


def toolset(tmp_path: Path, url: str, **config: Any) -> ToolSet:
    content = yaml.safe_load((PROJECT / "configs/tools/code_interpreter.yaml").read_text())
    content["tools"][0]["config"] |= {"url": url, **config}
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump(content))
    return ToolSet.from_yaml(path)


def in_style(agent: str, program: str) -> str:
    if agent == "retool":
        return f"I compute.\n<code>\n```python\n{program}\n```\n</code> and made this up"
    return call("code_interpreter", code=program)


def number(session: str) -> int:
    """Of the trajectory `t/<number>.<try>`."""
    return int(session.removeprefix("t/").partition(".")[0])


def script(agent: str, keeps: bool) -> Script:
    """Remembers its number, adds to it, answers. Without a session the second program has to remember again."""

    def say(session: str, turn: int) -> str:
        remember = f"x = 1000 + {number(session)}"
        if turn == 0:
            return in_style(agent, f"{remember}\nprint(x)")
        if turn == 1:
            return in_style(agent, "x * 2" if keeps else f"{remember}\nx * 2")
        return "#### 5"

    return say


@pytest.mark.slice(1, "soak")
@pytest.mark.parametrize("agent", ["tool_agent", "retool"])
@pytest.mark.parametrize("keeps", [False, True])
async def test_many_trajectories_at_once(
    bench: MakeBench, server: Server, tmp_path: Path, agent: str, keeps: bool
) -> None:
    tools = toolset(tmp_path, server.url, session=keeps)
    await tools.start("test")
    b = bench(script(agent, keeps), tools)
    trajectories = await b.run(sample(agent), n=MANY)
    for t in trajectories:
        assert (t.status, t.score, t.metrics["retries"]) == (Status.COMPLETED, 1.0, 0.0)
        mine = 1000 + number(t.uid)
        assert [record.response for record in t.tool_calls] == [str(mine), str(2 * mine)]
    assert len({record.response for t in trajectories for record in t.tool_calls}) == 2 * MANY
    await tools.close()
    health = httpx.get(f"{server.url}/health").json()
    assert (health["sessions"], health["running"], health["waiting"]) == (0, 0, 0)


@pytest.mark.slice(1, "kill")
@pytest.mark.parametrize("keeps", [False, True])
async def test_a_server_killed_among_them_costs_no_trajectory(bench: MakeBench, tmp_path: Path, keeps: bool) -> None:
    """It comes back: stateless programs are run again, trajectories that lost their session begin again."""
    killed = asyncio.Event()

    with running(None) as first:
        tools = toolset(tmp_path, first.url, session=keeps, breaker_seconds=0.2, attempts=100)
        await tools.start("test")
        told = script("tool_agent", keeps)

        def say(session: str, turn: int) -> str | Exception:
            if turn == 1 and number(session) == MANY // 2 and not killed.is_set():
                first.process.kill()
                killed.set()
            return told(session, turn)

        b = bench(say, tools, trajectory_timeout=120.0)
        run = asyncio.create_task(b.run(sample(), n=MANY))
        await killed.wait()
        await asyncio.to_thread(first.process.wait)
        port = int(first.url.rpartition(":")[2])
        with running(None, port=port):
            trajectories = await run
            await tools.close()
    assert [t.status for t in trajectories] == [Status.COMPLETED] * MANY
    for t in trajectories:
        mine = 1000 + number(t.uid)
        assert [record.response for record in t.tool_calls] == [str(mine), str(2 * mine)]
        assert t.score == 1.0
    begun_again = sum(t.metrics["retries"] for t in trajectories)
    assert begun_again > 0 if keeps else begun_again == 0


async def test_a_server_that_stays_away_is_a_failure_without_reward(bench: MakeBench, tmp_path: Path) -> None:
    with running(None) as server:
        tools = toolset(tmp_path, server.url, session=True, run_timeout=0.5, timeout=1.0, attempts=2)
        await tools.start("test")
        told = script("tool_agent", True)

        def say(session: str, turn: int) -> str | Exception:
            if turn == 1 and server.process.poll() is None:
                server.process.kill()
                server.process.wait()
            return told(session, turn)

        b = bench(say, tools, max_retries=1)
        trajectories = await b.run(sample(), n=4)
        await tools.close()
    for t in trajectories:
        assert (t.status, t.score, t.metrics["retries"]) == (Status.FAILED, None, 1.0)
        assert t.failure is not None and "tool code_interpreter" in t.failure


async def test_a_file_that_a_program_leaves_reaches_the_reward_function(
    bench: MakeBench, server: Server, tmp_path: Path
) -> None:
    tools = toolset(tmp_path, server.url)
    row = sample(tools_kwargs={"code_interpreter": {"create_kwargs": {"fetch_files": ["answer.txt"]}}})
    b = bench([call("code_interpreter", code="open('answer.txt', 'w').write('5')"), "#### 5"], tools)
    (t,) = await b.run(row)
    await tools.close()
    assert {path: base64.b64decode(content) for path, content in t.tool_calls[0].files.items()} == {"answer.txt": b"5"}
    assert t.tool_calls[0].response == "1"
