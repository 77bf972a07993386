"""The tool `bash`: commands of a trajectory in a container of its own, judged in a second one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.errors import ConfigError
from agentrl.tool import ErrorKind
from agentrl.tool.session import ToolInfrastructureError, ToolSession
from agentrl.tool.toolset import ToolSet
from tests.containers.conftest import Boxed, boxed, mounts, names, root
from tests.naming import Names, naming

__all__ = ["boxed", "root"]
CHECK = ["sh", "tests/run.sh"]
ROW = {
    "files": [{"path": "read.me", "text": "Numbers: 2, 3."}],
    "check_files": [{"path": "tests/run.sh", "text": "grep -qx 5 answer.txt"}],
}
Open = Callable[..., Any]


def mine() -> list[str]:
    return [name for name in names() if f"-{os.getpid()}-" in name]


@pytest.fixture
def tools(boxed: Boxed, tmp_path: Path, bound: Callable[[ToolSet], ToolSet]) -> Callable[..., ToolSet]:
    def made(box: dict[str, Any] | None = None, **config: Any) -> ToolSet:
        options = boxed()
        given = {"image": options.image, "command_line": list(options.command_line or ()), "memory_megabytes": 256}
        container = {**given, "arguments": list(options.arguments), **(box or {})}
        entry = {
            "class_name": "tools.container_shell.ContainerShell",
            "config": {"container": container, "check": CHECK, **config},
        }
        path = tmp_path / "tools.yaml"
        path.write_text(yaml.safe_dump({"tools": [entry]}))
        return bound(ToolSet.from_yaml(path))

    return made


@pytest.fixture
def opened(tools: Callable[..., ToolSet]) -> Open:
    @asynccontextmanager
    async def one(
        rewards: list[float], row: dict[str, Any] = ROW, box: dict[str, Any] | None = None, **config: Any
    ) -> AsyncIterator[ToolSession]:
        toolset = tools(box, **config)
        await toolset.start("test")
        session = await toolset.open("t/0.0", {"bash": {"create_kwargs": row}})
        try:
            yield session
        finally:
            rewards += await session.close()
            await toolset.close()
        assert mine() == []

    return one


async def run(session: ToolSession, command: str) -> str:
    answer = await session.call("bash", {"command": command})
    assert answer.error is None, answer
    return answer.text


async def test_files_stay_from_command_to_command_and_are_judged_apart(opened: Open) -> None:
    rewards: list[float] = []
    async with opened(rewards) as session:
        assert await run(session, "cat read.me; ls") == "Numbers: 2, 3.read.me", "no file of the check"
        assert await run(session, "echo 5 >answer.txt; echo no >&2; exit 3") == "no\n[exit status 3]"
        assert await run(session, "mkdir tests; echo exit 0 >tests/run.sh; cat answer.txt; cd tests") == "5"
        assert await run(session, "true") == "(no output)"
    assert rewards == [1.0]


@pytest.mark.slice(0, "matrix")
@pytest.mark.parametrize("command", ["echo 6 >answer.txt", None])
async def test_what_does_not_pass_and_what_was_not_done_give_0(opened: Open, command: str | None) -> None:
    rewards: list[float] = []
    async with opened(rewards) as session:
        if command is not None:
            await run(session, command)
    assert rewards == [0.0]


@pytest.mark.slice(0, "hostile")
async def test_commands_that_go_too_far_are_ended_and_the_next_one_runs(opened: Open) -> None:
    rewards: list[float] = []
    box = {"output_megabytes": 1, "disk_megabytes": 32, "processes": 64}
    async with opened(rewards, box=box, command_timeout=2, check=["true"]) as session:
        assert await run(session, "echo begun; sleep 600") == "begun\n[ended after 2 s, or by its memory]"
        assert (await run(session, "yes")).endswith("[ended: more than 1 MiB of output]")
        assert "bash" not in await run(session, "head -c 64M /dev/zero >large || rm large; ls")
        assert await run(session, "ls read.me") == "read.me"
        for command in ("a\0b", "echo " + "é" * 50_000):
            assert (await session.call("bash", {"command": command})).error is ErrorKind.ARGUMENTS
        assert await run(session, "echo " + "é" * 49_993 + " | wc -c") == "99987"
    assert rewards == [1.0]


@pytest.mark.slice(0, "hostile")
async def test_a_command_that_stops_its_clock_or_replaces_it_fails_no_trajectory(
    opened: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that has done badly must not be able to have its trajectory left out."""
    monkeypatch.setattr("tools.container_shell.ENDED_AFTER", 3)
    (root / "app").mkdir(exist_ok=True)
    box = {"workdir": "/app", "arguments": [*mounts(), "--env", "PATH=/app/bin:/usr/bin:/bin"]}
    rewards: list[float] = []
    async with opened(rewards, box=box, command_timeout=2, check=["/bin/false"]) as session:
        assert await run(session, "kill -STOP $PPID; sleep 600") == "[ended after 2 s, or by its memory]"
        fake = "mkdir bin; printf '#!/bin/sh\\n/bin/sleep 600' >bin/timeout; chmod 755 bin/timeout"
        assert await run(session, fake) == "(no output)"
        assert await run(session, "echo next") == "[ended after 2 s, or by its memory]"
    assert rewards == [0.0]


@pytest.mark.slice(0, "matrix")
async def test_a_container_that_cannot_be_filled_is_no_reward_and_one_failure(opened: Open) -> None:
    rewards: list[float] = []
    large = {**ROW, "files": [{"path": "large", "text": "x" * (3 << 20)}]}
    async with opened(rewards, large, box={"disk_megabytes": 1}) as session:
        with pytest.raises(ToolInfrastructureError, match="filling a container"):
            await session.call("bash", {"command": "true"})
    assert rewards == [0.0]


@pytest.mark.slice(0, "matrix")
async def test_a_row_may_name_an_image_that_the_config_allows(opened: Open) -> None:
    with naming(Exception, "image", "allows"):
        async with opened([], {**ROW, "image": "/etc"}):
            pass


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"container": {}}, ("container.image", "container.images")),
        ({"container": {"image": "a", "user": "0:0"}}, "container.uidmap"),
        ({"container": {"image": "a"}, "timeout": 30}, "timeout=30"),
    ],
)
def test_a_config_that_cannot_be_is_refused(tools: Callable[..., ToolSet], config: dict[str, Any], says: Names) -> None:
    with naming(ConfigError, says):
        tools(**config)
