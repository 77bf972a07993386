"""MCP servers that we start: one written with the official SDK, and one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from agentrl.errors import ConfigError
from agentrl.tool import ErrorKind
from agentrl.tool.session import ToolInfrastructureError, ToolSession
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import ToolAnswer
from tests.naming import assert_names, naming
from tools.mcp import connection
from tools.mcp.tools import Sessions

SDK = [sys.executable, "-m", "tests.tools.mcp_server"]
FAULTY = [sys.executable, "-I", "-S", str(Path(__file__).with_name("faulty_mcp_server.py"))]
Call = Callable[..., Any]


def load(folder: Path, config: dict[str, Any], timeout: float = 20.0) -> ToolSet:
    """From a YAML file."""
    entry = {"class_name": "tools.mcp.MCPTools", "config": config}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    tools = ToolSet.from_yaml(folder / "tools.yaml", timeout=timeout, max_response_tokens=100_000)
    tools.bind(lambda text: [ord(character) for character in text], lambda ids: "".join(map(chr, ids)))
    return tools


@asynccontextmanager
async def running(tools: ToolSet) -> AsyncIterator[ToolSession]:
    await tools.start("a-run")
    session = await tools.open("one", {})
    try:
        yield session
    finally:
        await session.close()
        await tools.close()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int, seconds: float = 20.0) -> bool:
    for _ in range(int(seconds / 0.05)):
        if not lives(pid):
            return True
        await asyncio.sleep(0.05)
    return False


async def told(session: ToolSession, name: str, **arguments: Any) -> str:
    result: ToolAnswer = await session.call(name, arguments)
    assert result.error is None, result
    return result.text


def test_what_a_server_was_passed_is_hidden_in_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("A_TOKEN", "passed-on-and-secret")
    command = [sys.executable, "-c", "import os, sys; sys.exit('bad token ' + os.environ['A_TOKEN'])"]
    with pytest.raises(ConfigError, match=r"bad token \[secret\]"):
        load(tmp_path, {"command": command, "pass_env": ["A_TOKEN"]}, 60.0)
    assert "passed-on" not in caplog.text


async def test_a_server_of_the_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hidden")
    monkeypatch.setenv("A_TOKEN", "passed")
    monkeypatch.chdir(Path(__file__).parents[2])
    tools = load(tmp_path, {"command": SDK, "pass_env": ["A_TOKEN"], "prefix": "my_", "breaker_seconds": 0.2}, 60.0)
    assert tools.names == ["my_add", "my_slow", "my_count", "my_variables", "my_picture", "my_refuse"]
    assert tools.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    async with running(tools) as session:
        assert await told(session, "my_add", a=2, b=3) == "5"
        assert await told(session, "my_count") == "1"
        seen = await told(session, "my_variables")
        assert "A_TOKEN" in seen and "A_SECRET" not in seen
        assert await told(session, "my_picture") == "a dot:\n[1 images left out: only text can be shown]"
        refused = await session.call("my_refuse", {"why": "too late"})
        assert (refused.error, refused.text) == (
            ErrorKind.EXECUTION,
            "Error (execution): Error executing tool refuse: too late",
        )
        assert (await session.call("my_add", {"a": 1})).error is ErrorKind.ARGUMENTS
        # killed in mid-call: what may be repeated is answered by the next process, what may not fails its trajectory
        calls = [session.call("my_add", {"a": n, "b": 0, "seconds": 1.0}) for n in range(20)]
        working = asyncio.gather(*calls, session.call("my_slow", {"seconds": 1.0}), return_exceptions=True)
        await asyncio.sleep(0.3)
        os.killpg(process_group(tools), signal.SIGKILL)
        *answers, slow = await working
        assert [answer.text for answer in answers if isinstance(answer, ToolAnswer)] == [str(n) for n in range(20)]
        assert isinstance(slow, ToolInfrastructureError)
        assert await told(session, "my_count") == "1"


def process_group(tools: ToolSet) -> int:
    """Of the server that all share."""
    pid = next(iter(tools.slots.values())).tool._sessions.link.pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


async def test_what_the_documents_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server and the YAMLs of docs/http_tools.md, and our own configs, of which mcp.yaml names the same server."""
    text = (Path(__file__).parents[2] / "docs" / "http_tools.md").read_text()
    for name, block in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    assert ToolSet.from_yaml("my_endpoint.yaml").names == ["search_papers"]
    assert ToolSet.from_yaml("tools/http.yaml").names == ["weather"]
    assert ToolSet.from_yaml("tools/mcp.yaml").names == ["add"]
    tools = ToolSet.from_yaml("my_mcp.yaml", timeout=20.0)
    tools.bind(lambda text: [ord(character) for character in text], lambda ids: "".join(map(chr, ids)))
    async with running(tools) as session:
        assert await told(session, "add", a=2, b=3) == "5"


async def test_what_a_server_may_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tools = load(tmp_path, {"command": FAULTY, "max_answer_bytes": 1 << 20})
    async with running(tools) as session:
        assert await told(session, "echo", text="<|im_end|>\u2028ß") == "<|im_end|>\u2028ß"
        with naming(ToolInfrastructureError, "1048576 bytes", "answer"):
            await session.call("flood", {"megabytes": 40})
        assert await told(session, "garbage") == "after garbage"
        assert_names(caplog.text, "b'Listening...'")
        assert await told(session, "noise", megabytes=8) == "after noise"
        assert await told(session, "echo", text="still here") == "still here"
        error = await session.call("protocol_error", {})
        assert (error.error, error.text) == (ErrorKind.EXECUTION, "Error (execution): no such file: x")
        with pytest.raises(ToolInfrastructureError) as caught:
            await session.call("die", {})
        assert "enough" not in str(caught.value)
        assert await told(session, "echo", text="again") == "again"
        assert "I have had enough" in caplog.text and "ended with status 3" in caplog.text


async def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    tools = load(tmp_path, {"command": FAULTY, "timeout": 1.0})
    async with running(tools) as session:
        with pytest.raises(ToolInfrastructureError, match=r"silence: .*no answer within 0\.[89]\d* s"):
            await session.call("silence", {})
        with pytest.raises(ToolInfrastructureError, match=r"change: .*no answer within 0\.[89]\d* s"):
            await session.call("change", {"seconds": 1.2})
        await asyncio.sleep(0.5)  # its answer comes, and nobody waits for it
        assert await told(session, "echo", text="x") == "x"


@pytest.mark.slice(0, "kill")
async def test_a_hung_server_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE", 0.3)
    tools = load(tmp_path, {"command": FAULTY, "attempt_timeout": 0.5, "attempts": 50}, 15.0)
    async with running(tools) as session:
        first = process_group(tools)
        os.killpg(first, signal.SIGSTOP)
        with pytest.raises(ToolInfrastructureError):
            await session.call("count", {})
        assert await told(session, "echo", text="x") == "x"
        assert process_group(tools) != first
        assert await gone(first)


async def test_many_trajectories_share_a_server(tmp_path: Path) -> None:
    """Whichever order the answers come in, everyone gets its own; a call that is given up disturbs nobody."""
    tools = load(tmp_path, {"command": FAULTY})
    async with running(tools):
        sessions = await asyncio.gather(*(tools.open(f"t{n}", {}) for n in range(300)))
        given_up = [asyncio.create_task(session.call("silence", {})) for session in sessions[:50]]
        answers = await asyncio.gather(
            *(session.call("echo", {"text": f"{n}-{turn}"}) for n, session in enumerate(sessions) for turn in range(3))
        )
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert [answer.text for answer in answers] == [f"{n}-{turn}" for n in range(300) for turn in range(3)]
        assert await told(sessions[0], "count") == "1"
        await asyncio.gather(*(session.close() for session in sessions))


async def test_a_session_for_each_trajectory(tmp_path: Path) -> None:
    tools = load(tmp_path, {"command": FAULTY, "session": "trajectory"})
    await tools.start("a-run")
    first, second = await tools.open("one", {}), await tools.open("two", {})
    try:
        pid, other = int(await told(first, "pid")), int(await told(second, "pid"))
        assert [await told(first, "count"), await told(first, "count"), await told(second, "count")] == ["1", "2", "1"]
        os.kill(pid, signal.SIGKILL)
        for name in ("count", "echo"):  # what the server knew is lost: the trajectory cannot go on, whatever it asks
            with pytest.raises(ToolInfrastructureError):
                await session_call_within(first, name)
        assert await told(second, "count") == "2"
        await second.close()
        assert await gone(other)
        left = await tools.open("three", {})
        pid = int(await told(left, "pid"))
    finally:
        await first.close()
        await tools.close()
    assert await gone(pid)


async def session_call_within(session: ToolSession, name: str) -> None:
    async with asyncio.timeout(5):
        await session.call(name, {"text": "x"} if name == "echo" else {})


async def test_servers_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "stubborn")
    servers = {
        "one": {"command": FAULTY[0], "args": [*FAULTY[1:], "${MODE}"], "autoApprove": []},
        "off": {"command": "nothing", "disabled": True},
        "crash": {"command": FAULTY[0], "args": [*FAULTY[1:], "crash"]},
    }
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    config = {"servers_file": str(file), "servers": ["one", "off"], "tools": ["pid", "echo"], "safe": True}
    tools = load(tmp_path, config)
    assert tools.names == ["echo", "pid"]
    async with running(tools) as session:
        pid = int(await told(session, "pid"))
    assert await gone(pid)
    with pytest.raises(ConfigError, match=r"MCP server crash: .*\n?.*the key is missing"):
        load(tmp_path, {"servers_file": str(file)})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "expected exactly one of command, url, servers_file, found none"),
        ({"command": ["x"], "url": "http://h/"}, "found command and url"),
        ({"url": "http://h/", "pass_env": ["HOME"]}, "pass_env has no effect with url"),
        ({"url": "http://h:port/"}, "url: expected http://HOST:PORT/PATH"),
        ({"url": "http://h/", "auth_env": "NOT_SET"}, "the environment variable NOT_SET is not set"),
        ({"command": ["/no/such/program"]}, "/no/such/program: No such file or directory"),
        ({"command": [*FAULTY, "crash"]}, "stderr: the key is missing"),
        ({"command": [*FAULTY, "mute"], "start_timeout": 0.5}, "no answer within 0.5 s of its start"),
        ({"command": [*FAULTY, "forever"]}, "more than 100 pages"),
        ({"command": [*FAULTY, "remote"]}, "tool_schema of 'far'"),
        ({"command": FAULTY, "tools": ["ecko"]}, "no tool 'ecko'; did you mean 'echo'"),
        ({"command": FAULTY, "session": "trajectory", "on_resume": "answers"}, "expected calls or none"),
        ({"command": FAULTY, "comand": []}, "unknown key 'comand'; did you mean 'command'"),
        ({"servers_file": "/no/such.json"}, "servers_file /no/such.json: cannot be read"),
    ],
)
async def test_an_entry_that_cannot_be(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=r"tools.yaml: tools\[0\] \(tools.mcp.MCPTools\)") as caught:
        load(tmp_path, config)
    assert says in " ".join(str(caught.value).split())


def test_an_entry_with_a_key_that_verl_has(tmp_path: Path) -> None:
    """Verl's own entries, by its class names, are in tests/verl/."""
    (tmp_path / "tools.yaml").write_text(
        "tools:\n"
        "  - class_name: my.MCPSearchTool\n"
        "    config: {type: mcp, rate_limit: 120}\n"
        "    mcp: {mcp_servers_config_path: ./mcp.json, tool_selected_list: [search]}\n"
    )
    with pytest.raises(ConfigError) as caught:
        ToolSet.from_yaml(tmp_path / "tools.yaml")
    assert "class_name: tools.mcp.MCPTools" in str(caught.value)
    assert "config: {servers_file: ./mcp.json, tools: [search]}" in str(caught.value)


async def test_a_server_ends_with_the_trainer_and_not_with_ctrl_c(tmp_path: Path) -> None:
    """Also one that ends neither with its stdin nor at SIGTERM, and its children."""
    script = f"""
        import asyncio, signal
        from tools.mcp.tools import MCPTools, Sessions

        async def main():
            tools = {{tool.name: tool for tool in MCPTools({{"command": {[*FAULTY, "stubborn"]!r}}}).tools()}}
            await tools["pid"].start("a-run")
            while True:
                print((await tools["pid"].execute("one", {{}})).text, tools["pid"]._sessions.link.pid, flush=True)
                await asyncio.get_running_loop().run_in_executor(None, input)

        signal.signal(signal.SIGINT, lambda *_: None)
        asyncio.run(main())
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert trainer.stdin is not None and trainer.stdout is not None
    try:
        server, group = map(int, (await asyncio.to_thread(trainer.stdout.readline)).split())
        members = [int(path.name) for path in Path("/proc").glob("[0-9]*") if group_of(path) == group]
        assert server in members and len(members) == 3  # the launcher, the server and its child
        os.killpg(trainer.pid, signal.SIGINT)  # as the terminal does
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert await asyncio.to_thread(trainer.stdout.readline) == f"{server} {group}\n"
    finally:
        trainer.kill()
        trainer.wait()
    for pid in members:
        assert await gone(pid)


def group_of(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, IndexError):
        return None


async def test_a_session_that_the_runs_end_closed_may_be_released() -> None:
    class Closed:
        async def open(self) -> None:
            pass

        close = open

    sessions = Sessions(Closed)  # type: ignore[arg-type]
    await sessions.open("t")
    await sessions.close()
    await sessions.release("t")
