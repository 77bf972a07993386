"""create once, calc_reward once, release exactly once: however the trajectory goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.errors import CodeError
from agentrl.tool import Tool, ToolResponse
from agentrl.tool.session import ToolInfrastructureError
from agentrl.tool.toolset import ToolSet
from tests.naming import Names, naming

Bind = Callable[[ToolSet], ToolSet]


class Recording(Tool):
    """Writes down what is asked of it; faults are injected by config: {hook: seconds to sleep or exception}."""

    def __init__(self, config: dict[str, Any], name: str = "recording") -> None:
        limits = {key: config[key] for key in ("timeout",) if key in config}
        super().__init__(limits, {"type": "function", "function": {"name": name, "parameters": {}}})
        self.faults = config
        self.log: list[str] = []

    async def _do(self, what: str, instance_id: str) -> None:
        self.log.append(f"{what} {instance_id}")
        fault = self.faults.get(what)
        if isinstance(fault, float):
            await asyncio.sleep(fault)
        elif fault is not None:
            raise fault
        else:
            await asyncio.sleep(0)

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        await self._do("create", instance_id)
        self.log.append(str(create_kwargs))

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        await self._do("execute", instance_id)
        return ToolResponse("ok")

    async def calc_reward(self, instance_id: str) -> float | None:
        await self._do("calc_reward", instance_id)
        return self.faults.get("reward", 0.5)

    async def release(self, instance_id: str) -> None:
        await self._do("release", instance_id)


def only(recording: Recording, *hooks: str) -> list[str]:
    return [line for line in recording.log if line.split()[0] in hooks]


async def test_the_whole_life_in_order(bound: Bind) -> None:
    recording = Recording({})
    session = await bound(ToolSet.from_tools([recording])).open("a", {"recording": {"create_kwargs": {"size": 3}}})
    assert recording.log == ["create a", "{'size': 3}"], "a tool that the row names is created at the start"
    await session.call("recording", {})
    await session.call("recording", {})
    assert await session.close() == [0.5]
    assert recording.log[2:] == ["execute a", "execute a", "calc_reward a", "release a"]


@pytest.mark.parametrize("kwargs", [{}, {"recording": None}])
async def test_other_tools_are_created_at_their_first_call_once(
    bound: Bind, kwargs: dict[str, dict[str, Any] | None]
) -> None:
    recording = Recording({"create": 0.02})
    session = await bound(ToolSet.from_tools([recording])).open("a", kwargs)
    assert recording.log == []
    await asyncio.gather(*(session.call("recording", {}) for _ in range(5)))
    assert only(recording, "create") == ["create a"]
    assert only(recording, "execute") == ["execute a"] * 5
    await session.close()


async def test_a_tool_that_was_not_used_is_not_touched(bound: Bind) -> None:
    recording = Recording({})
    session = await bound(ToolSet.from_tools([recording])).open("a", {})
    await session.call("recording", {"unknown": 1})
    assert await session.close() == []
    assert recording.log == []


async def test_closing_twice_or_at_once_releases_once(bound: Bind) -> None:
    recording = Recording({})
    session = await bound(ToolSet.from_tools([recording])).open("a", {"recording": {}})
    assert list(await asyncio.gather(session.close(), session.close())) == [[0.5], [0.5]]
    assert await session.close() == [0.5]
    assert only(recording, "calc_reward", "release") == ["calc_reward a", "release a"]
    with pytest.raises(RuntimeError, match="closed"):
        await session.call("recording", {})


async def test_cancelled_while_closing_it_still_releases(bound: Bind) -> None:
    recording = Recording({"calc_reward": 0.05})
    session = await bound(ToolSet.from_tools([recording])).open("a", {"recording": {}})
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert only(recording, "calc_reward", "release") == ["calc_reward a", "release a"]


async def test_cancelled_during_a_call_it_releases_at_close(bound: Bind) -> None:
    recording = Recording({"execute": 60.0})
    toolset = bound(ToolSet.from_tools([recording]))

    async def trajectory() -> None:
        session = await toolset.open("a", {})
        try:
            await session.call("recording", {})
        finally:
            await session.close()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(trajectory(), 0.05)
    assert only(recording, "create", "release") == ["create a", "release a"]


async def test_a_failing_create_fails_the_trajectory_and_releases_the_others(bound: Bind) -> None:
    good, bad = Recording({}, "good"), Recording({"create": ConnectionError("no room")}, "bad")
    toolset = bound(ToolSet.from_tools([good, bad]))
    with pytest.raises(ToolInfrastructureError, match="tool bad: create: ConnectionError: no room"):
        await toolset.open("a", {"good": {}, "bad": {}})
    assert only(good, "create", "release") == ["create a", "release a"]
    assert bad.log == ["create a"], "what was never created is not released"
    session = await toolset.open("b", {})
    with pytest.raises(ToolInfrastructureError, match="no room"):
        await session.call("bad", {})
    assert await session.close() == []


async def test_create_kwargs_that_do_not_fit_name_the_tool(bound: Bind) -> None:
    class Strict(Recording):
        async def create(self, instance_id: str, *, size: int = 1) -> None:  # type: ignore[override]
            return None

    with pytest.raises(CodeError, match=r"tool recording .*Strict\.create\): TypeError.*'sise'"):
        await bound(ToolSet.from_tools([Strict({})])).open("a", {"recording": {"create_kwargs": {"sise": 1}}})


async def test_cancelled_while_opening_it_releases_what_was_created(bound: Bind) -> None:
    quick, slow = Recording({}, "quick"), Recording({"create": 60.0}, "slow")
    toolset = bound(ToolSet.from_tools([quick, slow]))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(toolset.open("a", {"quick": {}, "slow": {}}), 0.05)
    assert only(quick, "create", "release") == ["create a", "release a"]


@pytest.mark.parametrize(
    ("faults", "kind", "says"),
    [
        ({"calc_reward": ValueError("lost")}, CodeError, ("calc_reward", "ValueError")),
        ({"calc_reward": OSError("lost")}, ToolInfrastructureError, ("calc_reward:", "OSError")),
        ({"calc_reward": 60.0, "timeout": 0.05}, ToolInfrastructureError, ("calc_reward:", "0.05 s")),
        ({"reward": float("nan")}, CodeError, ("calc_reward", "None")),
    ],
)
async def test_a_reward_that_cannot_be_had_fails_after_the_release(
    bound: Bind, faults: dict[str, Any], kind: type[Exception], says: Names
) -> None:
    recording, other = Recording(faults), Recording({}, "other")
    session = await bound(ToolSet.from_tools([recording, other])).open("a", {"recording": {}, "other": {}})
    with naming(kind, says):
        await session.close()
    assert only(recording, "release") == ["release a"]
    assert only(other, "release") == ["release a"]


async def test_a_failing_release_is_logged_and_spoils_nothing(bound: Bind, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording({"release": OSError("gone")})
    session = await bound(ToolSet.from_tools([recording])).open("a", {"recording": {}})
    assert await session.close() == [0.5]
    assert "trajectory a: tool recording: release: OSError: gone" in caplog.text
    assert only(recording, "release") == ["release a"]
