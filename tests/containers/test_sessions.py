"""Sessions of programs in containers: exact records, files in and out, the check apart, limits, nothing left."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.containers.contract import ContainerOptions
from agentrl.trajectory import Status
from tests.containers.conftest import Boxed, names
from tests.harnesses.conftest import Harnessed
from tests.harnesses.test_harness import HARNESS, PROGRAM

AGENT = """
import json, os, pathlib, sys, urllib.request

sample = json.load(sys.stdin)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": sample["prompt"]}).encode()
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(address, body, {"content-type": "text/json"})
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
exec(pathlib.Path("todo.py").read_text())
"""
COMMAND = ["python3", "-S", "-c", AGENT]
WRITES = "open('answer.txt', 'w').write(said)"

Make = Callable[..., Harnessed]
Options = Callable[..., AgentOptions]


def todo(code: str, **more: Any) -> dict[str, Any]:
    return {"files": [{"path": "todo.py", "text": code}], **more}


def mine() -> list[str]:
    return [name for name in names() if f"-{os.getpid()}-" in name]


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize(("said", "score"), [("5", 1.0), ("6", 0.0)])
async def test_a_session_is_recorded_and_what_it_leaves_is_judged_apart(
    harnessed: Make, options: Options, said: str, score: float
) -> None:
    used = harnessed(options(command=COMMAND), lambda prompt: said)
    (found,) = await used.run(todo(WRITES))
    assert (found.status, found.score, found.failure) == (Status.COMPLETED, score, None)
    ((prompt,),), ((answer,),) = used.bench.engine.prompts.values(), used.bench.engine.said.values()
    (transcript,) = found.transcripts
    assert transcript.ids == [*prompt, *answer]
    assert transcript.mask == [0] * len(prompt) + [1] * len(answer)
    assert found.metrics["containers"] == 2 and mine() == []


async def test_files_of_the_row_go_in_and_those_of_the_check_stand_over_what_is_left(
    harnessed: Make, options: Options
) -> None:
    code = (
        "import os; os.makedirs('tests/deep'); open('tests/deep/a.txt', 'w').write('wrong')\n"
        "os.symlink('/etc', 'link'); os.link('todo.py', 'second.py'); os.mkfifo('pipe'); os.makedirs('one.txt/inner')\n"
        "open('made.sh', 'w').write('#!/bin/sh\\necho ran'); os.chmod('made.sh', 0o4755)"
    )
    laid = [{"path": path, "text": "right"} for path in ("tests/deep/a.txt", "one.txt")]
    check = (
        "cat tests/deep/a.txt one.txt | grep -qx rightright && cmp todo.py second.py && [ ! -e pipe ] && "
        "[ $(./made.sh) = ran ] && [ ! -u made.sh ] && [ $(readlink link) = /etc ] && touch tests/deep/new"
    )
    used = harnessed(options(command=COMMAND, check=["sh", "-c", check]), lambda prompt: "5")
    (found,) = await used.run(todo(code, check_files=laid))
    assert (found.score, found.failure) == (1.0, None)


@pytest.mark.slice(0, "matrix")
async def test_a_conversation_reaches_a_command_and_a_harness_writes_its_settings(
    harnessed: Make, options: Options, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(HARNESS)
    more = {"harness": f"{tmp_path}/mine.py:Mine", "command": ["python3", "-S", "-c", PROGRAM]}
    (found,) = await harnessed(options(**more), lambda prompt: "5").run(todo(WRITES))
    assert (found.score, found.failure) == (1.0, None)
    prompt = [{"role": role, "content": "2 and 3"} for role in ("user", "assistant", "user")]
    (found,) = await harnessed(options(command=COMMAND), lambda prompt: "5").run(todo(WRITES), prompt=prompt)
    assert (found.score, found.failure) == (1.0, None)


MEMORY = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'bytearray(1 << 30)']); " + WRITES
DISK = "try:\n    open('large', 'wb').write(bytes(64 << 20))\nexcept OSError:\n    os.remove('large')\n    " + WRITES
FORKS = (
    "import time\ntry:\n    while True:\n        if not os.fork():\n            time.sleep(600)\n"
    f"except BlockingIOError:\n    {WRITES}"
)


@pytest.mark.slice(1, "hostile")
@pytest.mark.parametrize(
    ("code", "metric"),
    [
        (MEMORY, "container_memory_kills"),
        (f"{WRITES}; bytearray(1 << 30)", "container_memory_kills"),
        (DISK, None),
        (FORKS, None),
        (f"{WRITES}\nwhile True: print('x' * 4096)", "container_overruns"),
    ],
    ids=["memory of a child", "memory", "disk", "processes", "output"],
)
async def test_a_limit_holds_and_what_is_left_is_judged(
    harnessed: Make, options: Options, code: str, metric: str | None
) -> None:
    used = harnessed(options({"output_megabytes": 1}, command=COMMAND), lambda prompt: "5")
    (found,) = await used.run(todo(code))
    assert (found.status, found.score, found.failure) == (Status.COMPLETED, 1.0, None)
    assert metric is None or found.metrics[metric] == 1
    assert mine() == []


@pytest.mark.slice(0, "hostile")
async def test_what_a_program_locks_is_taken_out(harnessed: Make, options: Options) -> None:
    code = f"{WRITES}\nos.mkdir('one'); open('one/file', 'w'); os.chmod('one/file', 0); os.chmod('one', 0)"
    check = ["sh", "-c", "grep -qx 5 answer.txt && [ -e one/file ]"]
    (found,) = await harnessed(options(command=COMMAND, check=check), lambda prompt: "5").run(todo(code))
    assert (found.score, found.failure) == (1.0, None)


@pytest.mark.slice(0, "hostile")
async def test_more_than_is_judged_scores_0(harnessed: Make, options: Options) -> None:
    deep = "for number in range(60): os.mkdir('d' * 100); os.chdir('d' * 100)"
    code = f"{WRITES}\n{deep}"
    (found,) = await harnessed(options(command=COMMAND), lambda prompt: "5").run(todo(code))
    assert (found.score, found.failure) == (0.0, None)


async def test_a_check_whose_program_is_not_in_the_image_is_counted(harnessed: Make, options: Options) -> None:
    (found,) = await harnessed(options(command=COMMAND, check=["not-there"]), lambda prompt: "5").run(todo(WRITES))
    assert (found.status, found.score, found.score_extra["check_not_run"]) == (Status.COMPLETED, 0.0, 1.0)


async def test_rows_choose_among_the_images_of_the_config(harnessed: Make, options: Options) -> None:
    used = harnessed(options({"images": ["mine/*"]}, command=COMMAND), lambda prompt: "5")
    for image, said in (("other/x", r"extra_info\.image"), ("/etc", r"extra_info\.image"), ("mine/x", "pull mine/x")):
        (found,) = await used.run(todo(WRITES, image=image))
        assert found.failure is not None and re.search(said, found.failure)


@pytest.mark.slice(0, "matrix")
async def test_containers_of_a_pool_are_used_once(harnessed: Make, options: Options) -> None:
    code = "import glob; open('/tmp/left', 'a').write('x'); said = open('/tmp/left').read() + said\n" + WRITES
    used = harnessed(options({"pool": 2}, command=COMMAND, check=["grep", "-qx", "x5", "answer.txt"]), lambda _: "5")
    found = await used.run(todo(code), n=3)
    assert [one.score for one in found] == [1.0] * 3
    assert mine() == []


@pytest.fixture
def repository(boxed: Boxed, tmp_path: Path) -> ContainerOptions:
    """Make a root with a repository in /testbed, whose second commit is the solution."""
    options = boxed()
    assert options.image is not None
    root = tmp_path / "root"
    shutil.copytree(options.image, root, symlinks=True)
    bed = root / "testbed"
    bed.mkdir()
    for number, text in enumerate(("wrong", "right")):
        (bed / "value.txt").write_text(text)
        (bed / "old.txt").write_text("old")
        line = "git init -q . && git add -A && git -c user.name=a -c user.email=b commit -qm "
        subprocess.run(line + str(number), shell=True, cwd=bed, check=True)
    subprocess.run("git checkout -q HEAD~1", shell=True, cwd=bed, check=True)
    return options.model_copy(update={"image": str(root), "workdir": "/testbed"})


HISTORY = """
import subprocess
shown = subprocess.run("git log --all --format=%s; git reflog --format=%s; git status --short; "
                       "git show --all | grep -c ^.right; find / /testbed -xdev -name '*.pack' -o -name ORIG_HEAD",
                       shell=True, capture_output=True, text=True)
open("value.txt", "w").write("mine"); os.remove("old.txt"); os.makedirs("new/deep"); open("new/deep/file", "w")
open("seen.txt", "w").write(shown.stdout)
"""


@pytest.mark.parametrize("history", [False, True])
async def test_a_repository_of_the_image_hides_its_history(
    harnessed: Make, options: Options, repository: ContainerOptions, history: bool
) -> None:
    """The check finds all commits, and the files as the program left them: changed, new, and removed."""
    check = (
        "[ $(cat value.txt) = mine ] && [ ! -e old.txt ] && [ -e new/deep/file ] && "
        "[ $(git log --all --format=%s | sort | tr '\\n' _) = 0_1_ ] && "
        + ("grep -qx 1 seen.txt" if history else "[ $(tr '\\n' _ <seen.txt) = start_start_0_ ]")
    )
    given = options(command=COMMAND, check=["sh", "-c", check])
    given = given.model_copy(update={"container": repository.model_copy(update={"history": history})})
    (found,) = await harnessed(given, lambda prompt: "5").run(todo(HISTORY))
    assert (found.score, found.failure) == (1.0, None)


async def test_a_list_of_hosts_is_reached_and_nothing_else(
    harnessed: Make, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts are servers of this machine, at their own addresses and ports."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"hello\n")
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    code = f"""
import re, socket
proxy = re.match("http://(.*):(.*)", os.environ["HTTPS_PROXY"])
heard = []
for target in ("127.0.0.1:{ports[0]}", "127.0.0.1:{ports[1]}", "localhost:{ports[0]}", "1.1.1.1:443", "x"):
    with socket.create_connection((proxy[1], int(proxy[2])), timeout=20) as link:
        link.sendall(f"CONNECT {{target}} HTTP/1.1\\r\\n\\r\\n".encode())
        head = link.recv(100)
        if head.split()[1:2] == [b"200"]:
            link.sendall(b"hi\\n")
            head += link.recv(100) + link.recv(100)
        heard.append(head.split()[1].decode() if b"hello" not in head else "hello")
open("answer.txt", "w").write(" ".join(heard))
"""
    check = ["grep", "-qx", "hello 403 403 403 403", "answer.txt"]
    used = harnessed(options({"network": [f"127.0.0.1:{ports[0]}"]}, command=COMMAND, check=check), lambda prompt: "5")
    (found,) = await used.run(todo(code))
    for server in servers:
        server.close()
    assert (found.score, found.failure, asked) == (1.0, None, [b"hi\n"])


@pytest.mark.slice(0, "kill")
async def test_a_deadline_ends_the_container(harnessed: Make, options: Options) -> None:
    used = harnessed(options(command=COMMAND), lambda prompt: "5", trajectory_timeout=4.0)
    (found,) = await used.run(todo("import time; time.sleep(600)"))
    assert found.status is Status.TIMEOUT and mine() == []
