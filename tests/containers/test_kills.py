"""Containers that are killed at any moment of a session: it is tried again, counted once, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.containers import command_line
from agentrl.containers.contract import ContainerFailed, Spec, Unfit
from agentrl.system.processes import SharedProcess
from agentrl.trajectory import Status
from tests.containers.conftest import LINE, Boxed
from tests.containers.contract import ContainersContract
from tests.containers.test_sessions import COMMAND, WRITES, mine, todo
from tests.harnesses.conftest import Harnessed

SESSIONS, KILLS = 5, 3


async def kill_one(rng: random.Random) -> bool:
    """Kill a container of this process, if it has one that runs."""
    there = await asyncio.to_thread(mine)
    if not there:
        return False
    pipe = asyncio.subprocess.DEVNULL
    killing = await asyncio.create_subprocess_exec(*LINE, "kill", rng.choice(there), stdout=pipe, stderr=pipe)
    return await killing.wait() == 0


@pytest.mark.slice(1, "kill")
@pytest.mark.parametrize("seed", range(20))
async def test_a_session_whose_container_is_killed_is_tried_again(
    harnessed: Callable[..., Harnessed], options: Callable[..., AgentOptions], seed: int
) -> None:
    """Each seed has ten containers, for programs and checks, and kills three of them; each fifth is closed then."""
    rng, is_closed = random.Random(seed), seed % 5 == 4
    used = harnessed(options({"pool": rng.choice([0, 2])}, command=COMMAND), lambda prompt: "5", max_retries=8)
    running = asyncio.create_task(used.run(todo(f"import time; time.sleep({rng.uniform(0, 1)}); {WRITES}"), SESSIONS))
    killed = 0
    while killed < KILLS and not running.done():
        await asyncio.sleep(rng.uniform(0, 0.5))
        killed += await kill_one(rng)
    if is_closed:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    else:
        found = await running
        assert [(one.status, one.score, one.failure) for one in found] == [(Status.COMPLETED, 1.0, None)] * SESSIONS
        assert all(len(one.transcripts) == 1 and one.metrics["containers"] == 2 for one in found), "counted once"
        said = list(used.bench.engine.said.values())
        assert all(one.transcripts[0].ids[-len(said[0][0]) :] == said[0][0] for one in found)
    assert killed > 0 and mine() == []


@pytest.mark.slice(0, "kill")
@pytest.mark.parametrize("said", ["5", "5 and more words than the budget has"])
async def test_a_check_whose_container_is_killed_is_no_wrong_answer(
    harnessed: Callable[..., Harnessed], options: Callable[..., AgentOptions], said: str
) -> None:
    """A session whose budget was used up before is tried again, too."""
    given = options(command=COMMAND, check=["sh", "-c", "sleep 2; grep -q 5 answer.txt"])
    used = harnessed(given, lambda prompt: said, max_retries=2, max_response_tokens=6)
    running, seen, killed = asyncio.create_task(used.run(todo(WRITES))), set[str](), False
    while not running.done():
        seen |= set(there := await asyncio.to_thread(mine))
        if len(seen) == 2 and len(there) == 1 and not killed:
            killed = await kill_one(random.Random())
        await asyncio.sleep(0.1)
    (found,) = running.result()
    status = Status.COMPLETED if said == "5" else Status.LENGTH
    assert killed and (found.status, found.score, found.failure) == (status, 1.0, None)
    assert len(seen) == 4 and mine() == []


@pytest.mark.slice(0, "kill")
@pytest.mark.parametrize("is_own", [True, False])
async def test_a_program_that_ends_its_container_gets_no_other_try(
    boxed: Boxed, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    monkeypatch.setattr(command_line, "SLEEPER", "trap 'exit 0' USR1; while :; do sleep 3600 & wait $!; done")
    options, line = boxed(), command_line.CommandLine()
    await line.open(options)
    assert options.image is not None
    container = await line.start(Spec(options.image, options, "/tmp"))
    if is_own:
        await ContainersContract.ran(container, "kill -USR1 1; sleep 20")
    else:
        assert await kill_one(random.Random())
    with pytest.raises(ContainerFailed) as raised:
        await container.settle()
    await container.stop()
    await line.close()
    assert isinstance(raised.value, Unfit) == is_own


async def test_a_secret_that_other_processes_may_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        await SharedProcess.start(["true"], {"NAME": "x"}, "x")
