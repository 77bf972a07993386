"""Sessions of programs in containers: exact records, files in and out, the check apart, limits, nothing left."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.openai_api.agents import AgentOptions
from agentrl.trajectory import Status
from tests.containers.conftest import names
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


@pytest.mark.slice(0, "kill")
async def test_a_deadline_ends_the_container(harnessed: Make, options: Options) -> None:
    used = harnessed(options(command=COMMAND), lambda prompt: "5", trajectory_timeout=4.0)
    (found,) = await used.run(todo("import time; time.sleep(600)"))
    assert found.status is Status.TIMEOUT and mine() == []
