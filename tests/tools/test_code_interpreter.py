"""The code interpreter against a real sandbox server: what the model is shown, state, files, and whose fault it is."""

from __future__ import annotations

import asyncio
import base64
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from agentrl.errors import ConfigError, DataError
from agentrl.remote import RemoteUnavailable
from agentrl.tool import ToolSchema
from agentrl.tool.session import ToolInfrastructureError, ToolSession
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import ToolAnswer
from tests.naming import Names, naming
from tests.remote.conftest import Faulty, Handler, says
from tests.sandbox.servers import PROJECT, Server, running
from tools.code_interpreter import CodeInterpreterTool, unfenced
from tools.program_report import Command, report, shortened

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(None, options=("--concurrency", "4")) as up:
        yield up


def configured(tmp_path: Path, **config: Any) -> Path:
    """The shipped YAML with other values."""
    content = yaml.safe_load((PROJECT / "configs/tools/code_interpreter.yaml").read_text())
    content["tools"][0]["config"].update(config)
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def trajectory(server: Server, tmp_path: Path, bound: Callable[[ToolSet], ToolSet]) -> Open:
    @asynccontextmanager
    async def opened(files: dict[str, Any] | None = None, **config: Any) -> AsyncIterator[ToolSession]:
        toolset = bound(ToolSet.from_yaml(configured(tmp_path, url=server.url, **config)))
        await toolset.start("test")
        kwargs = {"code_interpreter": {"create_kwargs": files}} if files else {}
        session = await toolset.open("t/0.0", kwargs)
        try:
            yield session
        finally:
            await session.close()
            await toolset.close()

    return opened


async def run(session: ToolSession, code: str) -> str:
    result = await session.call("code_interpreter", {"code": code})
    assert result.error is None, result
    return result.text


async def sessions(server: Server) -> int:
    async with aiohttp.ClientSession() as client, client.get(f"{server.url}/health") as answer:
        return int((await answer.json())["sessions"])


async def test_a_stateless_program_shows_what_it_prints_and_its_last_value(trajectory: Open) -> None:
    async with trajectory() as t:
        assert await run(t, "print('a')\nx = 6\nx * 7") == "a\n42"
        assert await run(t, "x = 1") == "No output."
        assert "NameError: name 'x' is not defined" in await run(t, "x")
        assert await run(t, "```python\nprint(1)\n```") == "1"
        assert await run(t, "print('\ud800é')") == "?é"
    async with trajectory(show_last_expression=False) as t:
        assert await run(t, "6 * 7") == "No output."


@pytest.mark.parametrize("session", [False, True])
async def test_an_error_shows_the_programs_own_frames_at_its_own_lines(trajectory: Open, session: bool) -> None:
    file = "<cell 1>" if session else "main.py"
    async with trajectory(session=session) as t:
        shown = await run(t, "```python\nimport json\nprint('a')\n\ndef f():\n    json.loads('{')\n\nf()\n```")
        assert shown.splitlines()[:6] == [
            "a",
            "Traceback (most recent call last):",
            f'  File "{file}", line 7, in <module>',
            "    f()",
            f'  File "{file}", line 5, in f',
            "    json.loads('{')",
        ]
        assert shown.splitlines()[6].strip() == "[3 frames left out]"
        assert shown.splitlines()[7].startswith("json.decoder.JSONDecodeError: Expecting property name")
        syntax = (await run(t, "x = 1\ndef f(:")).splitlines()
        assert syntax[0].endswith('", line 2') and "ast.py" not in syntax[0]
        assert syntax[-1] == "SyntaxError: invalid syntax"


async def test_limits_are_named_in_plain_words(trajectory: Open) -> None:
    async with trajectory(run_timeout=0.5, memory_limit_mb=64) as t:
        assert await run(t, "print('a', flush=True)\nwhile True: pass") == "a\nThe program was stopped after 0.5 s."
        assert (await run(t, "x = b'1' * (500 << 20)")).endswith("The program ran out of memory (64 MB).")
        assert await run(t, "import sys; sys.exit(3)") == "The program ended with exit status 3."
        assert await run(t, "import os; os.abort()") == "The program was ended by the signal SIGABRT."
        long = await run(t, "print('a' * 3_000_000)\nprint('b')")
        assert "[the rest of stdout was too long and is lost]" in long and "tokens cut" in long


async def test_bash(trajectory: Open) -> None:
    async with trajectory(language="bash") as t:
        assert await run(t, "echo a; ls /nowhere; exit 2") == (
            "a\nls: cannot access '/nowhere': No such file or directory\nThe program ended with exit status 2."
        )


async def test_a_session_keeps_variables_until_the_trajectory_ends(trajectory: Open, server: Server) -> None:
    async with trajectory(session=True, run_timeout=0.5) as t:
        assert await sessions(server) == 0  # the one that start() tried is gone
        assert await run(t, "x = 20") == "No output."
        assert await run(t, "print('a')\nx + 1") == "a\n21"
        first, second = await asyncio.gather(run(t, "x += 1; x"), run(t, "x *= 2; x"))
        assert (first, second) == ("21", "42")  # in the order of the calls
        stopped = await run(t, "import time; time.sleep(9)")
        assert "KeyboardInterrupt" in stopped and stopped.endswith("The program was stopped after 0.5 s.")
        assert await run(t, "x") == "42"
        assert await sessions(server) == 1
        gone = await run(t, "import os; os._exit(4)")
        assert gone.startswith("The program ended with exit status 4.\nThe session has ended; variables and files are")
        assert "NameError" in await run(t, "x")
    assert await sessions(server) == 0


async def test_a_session_that_its_own_thread_ends_is_no_fault_of_the_server(trajectory: Open) -> None:
    async with trajectory(session=True) as t:
        await run(t, "import os, threading\nthreading.Timer(0.05, os._exit, (7,)).start()")
        await asyncio.sleep(1.0)
        assert (await run(t, "1")).startswith("The program ended with exit status 7.\nThe session has ended; variables")
        assert await run(t, "1") == "1"


async def test_a_session_that_the_server_lost_is_no_fault_of_the_policy(trajectory: Open, server: Server) -> None:
    async with trajectory(session=True) as t:
        await run(t, "x = 1")
        (tool,) = (slot.tool for slot in t._tools.slots.values())
        name = tool._instances["t/0.0"].session
        async with aiohttp.ClientSession() as client:
            await client.delete(f"{server.url}/sessions/{name}", headers={"x-client-id": "test"})
        with naming(ToolInfrastructureError, "restarted"):
            await t.call("code_interpreter", {"code": "x"})


@pytest.mark.parametrize("session", [False, True])
async def test_files_of_the_row_are_there(trajectory: Open, session: bool) -> None:
    files = {
        "files": {"data/a.csv": "x,y\n1,2\n", "of_another_row.txt": None},
        "files_base64": {"b.bin": base64.b64encode(bytes([0, 255])).decode()},
    }
    async with trajectory(files, session=session) as t:
        assert await run(t, "print(open('data/a.csv').read(), end='')\nopen('b.bin', 'rb').read()") == (
            "x,y\n1,2\nb'\\x00\\xff'"
        )
        if session:
            await run(t, "open('data/a.csv', 'w').write('mine')")
            assert await run(t, "open('data/a.csv').read()") == "'mine'"
            await run(t, "import os; os._exit(0)")
        assert await run(t, "open('data/a.csv').read(3)") == "'x,y'"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"files": {"../a": "x"}},
        {"files": {"/etc/a": "x"}},
        {"files": {"a": 5}},
        {"files_base64": {"a": "?"}},
        {"fetch_files": ["/home/x"]},
        {"file": {}},
    ],
)
async def test_files_that_cannot_be_are_the_datas_fault(kwargs: dict[str, Any]) -> None:
    tool = CodeInterpreterTool({"url": "http://127.0.0.1:1"})
    with pytest.raises(DataError, match="create_kwargs of code_interpreter"):
        await tool.create("t", **kwargs)


@pytest.mark.parametrize("session", [False, True])
async def test_files_that_the_row_names_are_collected(trajectory: Open, session: bool) -> None:
    async with trajectory({"fetch_files": ["out/a.csv", "never"]}, session=session, max_file_bytes=100) as t:
        call = functools.partial(t.call, "code_interpreter")
        write = "import os; os.makedirs('out', exist_ok=True); f = open('out/a.csv', 'w'); f.write({!r}); f.close()"
        written = await call({"code": write.format("x" * 100)})
        assert {path: base64.b64decode(content) for path, content in written.files.items()} == {"out/a.csv": b"x" * 100}
        large = await call({"code": write.format("x" * 103)})
        assert (large.files, large.text) == (
            {},
            "No output.\nThe file out/a.csv is larger than 100 bytes and is not collected.",
        )
        assert (await call({"code": "import os; os.path.exists('out/a.csv')"})).text.startswith(str(session))


async def test_empty_code_is_the_policys_mistake(trajectory: Open) -> None:
    async with trajectory() as t:
        result: ToolAnswer = await t.call("code_interpreter", {"code": "```python\n```"})
        assert (result.error, result.text) == ("arguments", "Error (arguments): code is empty")


async def test_programs_and_failures_are_counted(trajectory: Open) -> None:
    async with trajectory() as t:
        await run(t, "1")
        await run(t, "1 / 0")
        (tool,) = (slot.tool for slot in t._tools.slots.values())
        assert tool.take_metrics()["failed_rate"] == 0.5


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"session": True, "language": "bash"}, ("session: true", "language: python")),
        ({"url": "localhost:8080"}, "http://HOST:PORT"),
        ({"timeout": 5}, ("timeout=5", "run_timeout=10")),
        ({"attempt_timeout": 5}, ("attempt_timeout", "run_timeout=10")),
        ({"run_timeouts": 5}, "run_timeout"),
    ],
)
def test_a_config_that_cannot_work_is_refused(tmp_path: Path, config: dict[str, Any], reason: Names) -> None:
    with naming(ConfigError, reason):
        ToolSet.from_yaml(configured(tmp_path, **config))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"language": "cobol"}, "empty program"),
        ({"memory_limit_mb": 99_999}, "--max-memory-mb"),
        ({"url": "http://127.0.0.1:32599", "attempts": 1}, "`python -m sandbox.server --port 32599`"),
    ],
)
async def test_the_start_says_what_is_missing(
    server: Server, tmp_path: Path, config: dict[str, Any], reason: Names
) -> None:
    toolset = ToolSet.from_yaml(configured(tmp_path, **{"url": f"{server.url}/run_code", **config}))
    with naming(ConfigError, reason):
        await toolset.start("test")
    await toolset.close()


def test_the_description_tells_what_is_kept() -> None:
    def description(**config: Any) -> str:
        return str(CodeInterpreterTool({"url": "http://h:1", **config}).schema["function"]["description"])

    assert "nothing is kept" in description() and "value of its last line" in description()
    assert "Variables, imports and files are kept" in description(session=True)
    assert description(language="bash").startswith("Run a Bash program and get what it prints. ")
    own: ToolSchema = {"type": "function", "function": {"name": "python", "description": "Mine.", "parameters": {}}}
    assert CodeInterpreterTool({"url": "http://h:1"}, own).schema == own


@pytest.mark.parametrize(
    ("code", "program"),
    [
        ("```python\n  x\n```", "  x\n"),
        ("\n```\nx\n```\n", "x\n"),
        ("```py\nx", "x"),
        ("```x```", "x"),
        ("  x = '```'", "  x = '```'"),
    ],
)
def test_fences_are_taken_off(code: str, program: str) -> None:
    assert unfenced(code) == program


def test_a_deep_traceback_keeps_its_ends() -> None:
    frames = [f'  File "/home/sandbox/main.py", line {n}, in f\n    f{n}()' for n in range(900)]
    shown = shortened("\n".join(["Traceback (most recent call last):", *frames, "RecursionError: deep\n"]))
    assert shown.splitlines()[1:3] == ['  File "main.py", line 0, in f', "    f0()"]
    assert "  [889 frames left out]" in shown
    assert shown.endswith("f899()\nRecursionError: deep")


def test_a_server_of_sandboxfusion_has_no_limits_by_name() -> None:
    fields = {"status": "TimeLimitExceeded", "execution_time": 3.0, "return_code": None, "stdout": "a", "stderr": ""}
    assert report(Command.model_validate(fields), 3, None) == "a\nThe program was stopped after 3 s."


@pytest.mark.parametrize(
    "answer",
    [
        says(200, '{"status": "SandboxError", "message": "no fork", "run_result": null}'),
        says(200, "<html>"),
        says(404, '{"detail": "Not Found"}'),
    ],
)
async def test_a_sandbox_that_fails_is_no_fault_of_the_policy(
    tmp_path: Path, bound: Callable[[ToolSet], ToolSet], faulty: Faulty, answer: Handler
) -> None:
    server = await faulty(answer)
    toolset = bound(ToolSet.from_yaml(configured(tmp_path, url=server.url, attempts=2)))
    session = await toolset.open("t", {})
    with pytest.raises(ToolInfrastructureError):
        await session.call("code_interpreter", {"code": "1"})
    await session.close()
    await toolset.close()


async def test_a_server_without_sessions_is_named_at_the_start(tmp_path: Path, faulty: Faulty) -> None:
    server = await faulty(says(404))
    toolset = ToolSet.from_yaml(configured(tmp_path, url=server.url, session=True))
    with naming(ConfigError, "no sessions"):
        await toolset.start("test")
    await toolset.close()


async def test_sessions_that_a_busy_server_does_not_end_are_ended_later(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.code_interpreter.FOR_THE_END", 0.5)
    held: set[str] = set()
    is_busy = False

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            held.add((await request.json())["session_id"])
            return web.json_response({"status": "Success", "created": True, "alive": True, "run_result": None})
        if is_busy:
            return web.json_response({"detail": "injected"}, status=503)
        held.discard(request.path.rpartition("/")[2])
        return web.json_response({"closed": True})

    server = await faulty(answer)
    tool = CodeInterpreterTool({"url": server.url, "session": True, "run_timeout": 1.0})
    for name in "abc":
        await tool.create(name)
        await tool.execute(name, {"code": "1"})
    is_busy = True
    for name in "ab":
        with pytest.raises(RemoteUnavailable):
            await tool.release(name)
    assert len(held) == 3
    is_busy = False
    await tool.release("c")
    assert not held
    is_busy = True
    await tool.create("d")
    await tool.execute("d", {"code": "1"})
    with pytest.raises(RemoteUnavailable):
        await tool.release("d")
    is_busy = False
    await tool.close()
    assert not held
