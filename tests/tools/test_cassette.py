"""What tools answered is answered again, without them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import CodeError, ConfigError
from agentrl.system.cassette import Cassette, MethodCall, Mode, NotOnCassette
from agentrl.tool import Schema, Tool, ToolError, ToolResponse, ToolSchema, ToolSource
from agentrl.tool.session import ToolInfrastructureError
from agentrl.tool.shared import CallLimits
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import ToolAnswer
from tests.naming import naming

Bind = Callable[[ToolSet], ToolSet]
NUMBER: Schema = {"type": "object", "properties": {"n": {"type": "integer"}}}


class Dice(Tool):
    """Never answers the same twice: what is replayed cannot have been asked for again."""

    default_schema = {"type": "function", "function": {"name": "dice", "parameters": NUMBER}}
    rolls = itertools.count()

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        roll = next(self.rolls)
        if arguments["n"] == 13:
            raise ToolError(f"unlucky {roll}")
        if arguments["n"] == 14:
            raise RuntimeError("on fire")
        return ToolResponse(f"{arguments['n']}: {roll}", reward=float(roll), metrics={"rolled": 1.0})


class Counter(Tool):
    """Keeps state for a trajectory."""

    default_schema = {"type": "function", "function": {"name": "count", "parameters": NUMBER}}

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        super().__init__(config, schema)
        self.sums: dict[str, int] = {}

    async def create(self, instance_id: str, start: int = 0, **create_kwargs: Any) -> None:
        self.sums[instance_id] = start

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        self.sums[instance_id] += arguments["n"]
        return ToolResponse(str(self.sums[instance_id]))

    async def calc_reward(self, instance_id: str) -> float:
        return float(self.sums[instance_id])

    async def release(self, instance_id: str) -> None:
        del self.sums[instance_id]


class DiceSource(ToolSource):
    """Its tools are known only when it is there."""

    is_there = True

    def tools(self) -> list[Tool]:
        if not self.is_there:
            raise ConfigError("the server of the dice is not there")
        return [Dice(self.config), Counter(self.config)]


HERE = f"{__name__}"


@pytest.fixture
def on(tmp_path: Path, bound: Bind) -> Callable[[Mode], ToolSet]:
    """A tool set whose answers go to, or come from, one cassette."""

    def make(mode: Mode) -> ToolSet:
        toolset = ToolSet([Dice({"on_error": "fail"}), Counter()], CallLimits())
        toolset.cassette = Cassette(tmp_path / "answers.jsonl", mode)
        return bound(toolset)

    return make


async def roll(tools: ToolSet, instance: str, *numbers: int, name: str = "dice") -> list[ToolAnswer]:
    session = await tools.open(instance, {})
    results = [await session.call(name, {"n": number}) for number in numbers]
    await session.close()
    return results


async def test_answers_rewards_metrics_and_errors_come_back_as_they_were(on: Callable[[Mode], ToolSet]) -> None:
    numbers = (1, 1, 10**30, 13)
    recorded = await roll(on("record"), "a.0", *numbers)
    assert recorded[0].text != recorded[1].text
    assert await roll(on("replay"), "a.0", *numbers) == recorded


async def test_another_trajectory_gets_the_first_answer(on: Callable[[Mode], ToolSet]) -> None:
    recorded = await roll(on("record"), "a.0", 1, 1)
    assert [result.text for result in await roll(on("replay"), "b.7", 1, 1)] == [recorded[0].text] * 2


async def test_a_fault_fails_the_same_try_again_and_no_other(on: Callable[[Mode], ToolSet]) -> None:
    for mode in ("record", "replay"):
        with pytest.raises(ToolInfrastructureError, match="tool dice: RuntimeError: on fire"):
            await roll(on(mode), "a.0", 14)
    with pytest.raises(NotOnCassette):
        await roll(on("replay"), "a.1", 14)


async def test_a_missing_answer_names_the_call_and_stays_known(on: Callable[[Mode], ToolSet], tmp_path: Path) -> None:
    await roll(on("record"), "a.0", 1)
    tools = on("replay")
    with pytest.raises(NotOnCassette) as raised:
        await roll(tools, "a.0", 2)
    for part in (str(tmp_path / "answers.jsonl"), "dice", '{"n": 2}', "a.0", "tools.cassette=record"):
        assert part in str(raised.value)
    assert tools.cassette is not None
    with pytest.raises(NotOnCassette, match='"n": 2'):
        tools.cassette.check()


async def test_with_state_a_call_is_known_by_what_was_said_before(on: Callable[[Mode], ToolSet]) -> None:
    kwargs = {"count": {"create_kwargs": {"start": 100}}}

    async def play(tools: ToolSet) -> tuple[list[str], list[float]]:
        session = await tools.open("a.0", kwargs)
        texts = [(await session.call("count", {"n": n})).text for n in (1, 1, 5)]
        return texts, await session.close()

    assert await play(on("record")) == await play(on("replay")) == (["101", "102", "107"], [107.0])
    with pytest.raises(NotOnCassette):
        await roll(on("replay"), "a.0", 5, name="count")  # it was never the first call


async def test_a_killed_recording_is_replayed_as_far_as_it_came(on: Callable[[Mode], ToolSet], tmp_path: Path) -> None:
    recorded = await roll(on("record"), "a.0", 1, 2)
    whole = (tmp_path / "answers.jsonl").read_bytes()
    (tmp_path / "answers.jsonl").write_bytes(whole[:-20])
    assert await roll(on("replay"), "a.0", 1) == recorded[:1]
    again = await roll(on("record"), "a.0", 2)  # the run goes on, with the same cassette
    assert await roll(on("replay"), "a.0", 1, 2) == recorded[:1] + again
    (tmp_path / "answers.jsonl").write_bytes(b"{broken}\n" + whole)
    with naming(ConfigError, "answers.jsonl:1"):
        on("replay")


def test_a_second_recording_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """For all trajectories alike; what it does not have stays."""

    def call(number: int, instance: str = "a.0") -> MethodCall:
        return MethodCall("dice", "execute", instance, {"n": number})

    def recorded(*calls: tuple[int, str, bool]) -> None:
        cassette = Cassette(tmp_path / "answers.jsonl", "record")
        for number, text, is_fault in calls:
            cassette.record(call(number), {"text": text, "is_fault": is_fault})
        cassette.close()

    recorded((1, "old", False), (1, "old, again", False), (2, "kept", False), (3, "fault", True), (3, "old", False))
    recorded((1, "new", False), (3, "new", False))
    for instance in ("a.0", "another"):
        cassette = Cassette(tmp_path / "answers.jsonl", "replay")
        found = [cassette.replay(call(number, instance))["text"] for number in (1, 1, 2, 3, 3)]
        assert found == ["new", "new", "kept", "new", "new"]


def test_arrays_are_lists_on_a_cassette(tmp_path: Path) -> None:
    array = np.arange(2000)
    call, other = (MethodCall("tool", "execute", "t", {"of": one}) for one in (array, array * (array != 1000)))
    assert call.key != other.key
    recorder = Cassette(tmp_path / "c.jsonl", "record")
    recorder.record(call, {"value": array[:3], "number": np.float32(0.5)})
    recorder.close()
    assert Cassette(tmp_path / "c.jsonl", "replay").replay(call) == {"value": [0, 1, 2], "number": 0.5}


def test_nothing_to_replay_and_nowhere_to_record(tmp_path: Path) -> None:
    with naming(ConfigError, "tools.cassette_path", "none.jsonl"):
        Cassette(tmp_path / "none.jsonl", "replay")
    (tmp_path / "file").write_text("")
    with naming(ConfigError, "tools.cassette_path", "written"):
        Cassette(tmp_path / "file" / "x.jsonl", "record")


async def test_the_tools_of_a_source_are_on_the_cassette_too(
    tmp_path: Path, bound: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.yaml").write_text(f"tools:\n  - class_name: {HERE}.DiceSource\n    config: {{timeout: 5}}\n")

    def load(mode: Mode) -> ToolSet:
        cassette = Cassette(tmp_path / "answers.jsonl", mode)
        return bound(ToolSet.from_yaml(tmp_path / "tools.yaml", cassette=cassette))

    recording = load("record")
    recorded = await roll(recording, "a.0", 1), await roll(recording, "a.0", 2, 3, name="count")
    monkeypatch.setattr(DiceSource, "is_there", False)
    with pytest.raises(ConfigError, match="is not there"):
        load("record")
    replayed = load("replay")
    assert replayed.schemas == recording.schemas
    assert (await roll(replayed, "a.0", 1), await roll(replayed, "a.0", 2, 3, name="count")) == recorded


async def test_an_error_of_a_tools_code_comes_again_as_one(on: Callable[[Mode], ToolSet]) -> None:
    for mode in ("record", "replay"):
        with pytest.raises(CodeError, match=r"tool count \(.*Counter\.create\): TypeError: .*multiple values"):
            await on(mode).open("a.0", {"count": {"create_kwargs": {"instance_id": 1}}})
