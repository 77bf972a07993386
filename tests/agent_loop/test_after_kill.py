"""Trajectories that run again are answered as before, wherever they were when the process was killed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent_loop.base import Episode
from agentrl.agent_loop.function import FunctionLoop
from agentrl.system.answers import AfterKill, Answers, Entry, Kind
from agentrl.tool import FunctionTool, Tool, ToolResponse
from agentrl.trajectory import Status, Trajectory
from interactions.gsm8k import Gsm8kInteraction
from tests.agent_loop.conftest import Bench, call, sample
from tests.system.test_answers import live

MakeBench = Callable[..., Bench]
SCRIPT = [call("add", a=2, b=2), "It is 4. #### 4", call("add", a=2, b=3), "#### 5"]


class Count(Tool):
    """Keeps a state for a trajectory, and comes back only where a class says so."""

    def __init__(self) -> None:
        super().__init__({}, plain_adding().schema)
        self.counts: dict[str, int] = {}
        self.executed = 0

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        self.counts[instance_id] = 0

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        self.executed += 1
        self.counts[instance_id] += arguments["a"] + arguments["b"]
        return ToolResponse(str(self.counts[instance_id]))

    async def calc_reward(self, instance_id: str) -> float:
        return self.counts[instance_id] / 10

    async def release(self, instance_id: str) -> None:
        del self.counts[instance_id]


class Repeating(Count):
    after_kill: AfterKill = "calls"


def plain_adding() -> Tool:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return FunctionTool(add)


async def life(make: MakeBench, tool: Tool, recorded: list[Entry]) -> tuple[Trajectory, int, list[Entry], list[str]]:
    """The trajectory of a process that finds the entries: itself, its turns that were sampled, all entries, notes."""
    entries, notes = list(recorded), list[str]()
    gsm8k = Gsm8kInteraction({}, "gsm8k")
    bench = make(SCRIPT, [tool], interactions={"gsm8k": gsm8k})
    after_kill = {"tool add": tool.after_kill, "interaction gsm8k": gsm8k.after_kill}
    answers = Answers("t/0", entries.append, live(recorded), after_kill, notes.append)
    done = 0 if notes else sum(one.who.startswith("engine") for one in live(recorded))
    bench.engine.said["t/0.0"] = [[]] * done  # the script goes on where it stood
    row = sample(interaction_kwargs={"name": "gsm8k", "ground_truth": "5"})
    (request,) = bench.requests(row)
    (trajectory,) = await bench.scheduler.run([replace(request, answers=answers)])
    return trajectory, len(bench.engine.said["t/0.0"]) - done, entries, notes


def told(one: Trajectory) -> tuple[object, ...]:
    turns = [(turn.role, turn.text, turn.reward, turn.seed, len(turn.calls)) for turn in one.turns]
    return one.transcripts, turns, one.score, one.score_extra, one.status, one.failure, one.messages


@pytest.mark.parametrize(("tool", "kind"), [(plain_adding, "answers"), (Repeating, "calls"), (Count, "none")])
async def test_from_every_moment_it_goes_on_as_if_nothing_had_happened(
    bench: MakeBench, tool: Callable[[], Tool], kind: AfterKill
) -> None:
    assert tool().after_kill == kind
    whole, sampled, entries, _ = await life(bench, tool(), [])
    assert whole.status is Status.COMPLETED and sampled == len(SCRIPT)
    for killed in range(len(entries) + 1):
        before = entries[:killed]
        found, sampled, after, notes = await life(bench, tool(), before)
        assert told(found) == told(whole)
        turns = sum(one.who.startswith("engine") for one in before)
        if notes:
            (why,) = notes
            assert kind != "answers" or "interaction gsm8k" in why
            assert sampled == len(SCRIPT) and any(one.kind is Kind.ANEW for one in after)
        else:
            assert sampled == len(SCRIPT) - turns, "no finished turn is sampled twice"
            assert kind != "none" or not any(one.who == "tool add" for one in before)


async def test_a_loop_that_asks_otherwise_begins_anew(bench: MakeBench) -> None:
    numbers = itertools.count()

    async def moody(episode: Episode) -> None:
        await episode.start([{"role": "user", "content": f"It is {next(numbers)} o'clock."}])
        for _ in range(2):
            await episode.generate()
            await episode.observe([{"role": "user", "content": "And?"}])
        episode.finish(Status.COMPLETED)

    async def run(recorded: list[Entry], texts: list[str]) -> tuple[Trajectory, list[str]]:
        notes = list[str]()
        made = bench(texts)
        made.scheduler.loops = {"tool_agent": FunctionLoop(moody)}
        answers = Answers("t/0", entries.append, live(recorded), {}, notes.append)
        (trajectory,) = await made.scheduler.run([replace(made.requests(sample())[0], answers=answers)])
        return trajectory, notes

    entries: list[Entry] = []
    await run([], ["one", "two"])
    trajectory, notes = await run(list(entries), ["three", "four"])
    assert notes == ["engine, as t/0.0 is asked otherwise than before"]
    assert trajectory.status is Status.COMPLETED and trajectory.attempt == 0
    assert [turn.text for turn in trajectory.turns if turn.role == "assistant"] == ["three", "four"]
