"""Containers that a killed run left are found by their names, and those of a live run are left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentrl.containers.command_line import CommandLine
from agentrl.containers.contract import Spec
from tests.containers.conftest import LINE, Boxed, names
from tests.waiting import wait_for

STARTS = """
import asyncio, os, signal, sys
from agentrl.containers.command_line import CommandLine
from agentrl.containers.contract import ContainerOptions, Spec

async def main():
    options = ContainerOptions.model_validate_json(sys.argv[1])
    line = CommandLine()
    await line.open(options)
    container = await line.start(Spec(options.image, options, "/tmp", (8011,)))
    process = await container.run(["sleep", "600"], {"A": "a-secret"}, "/tmp", secret="a-secret", most=1)
    print(container.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_what_a_killed_run_left_is_removed_at_the_next_start(boxed: Boxed) -> None:
    options = boxed()
    run = subprocess.run(
        [sys.executable, "-c", STARTS, options.model_dump_json()], capture_output=True, text=True, timeout=120
    )
    left = run.stdout.strip()
    assert run.returncode == -signal.SIGKILL and left, run.stderr
    running = [*LINE, "ps", "--format", "{{.Names}}"]
    wait_for(lambda: left not in subprocess.run(running, capture_output=True, text=True, check=True).stdout)
    (folder := Path(tempfile.gettempdir(), left)).mkdir()  # as where it was killed within a start
    line = CommandLine()
    await line.open(options)
    assert options.image is not None
    live = await line.start(Spec(options.image, options, "/tmp"))
    await CommandLine().open(options)
    there = names()
    await live.stop()
    assert left not in there and live.name in there and not folder.exists()


@pytest.mark.slice(0, "kill")
async def test_a_start_that_is_cancelled_leaves_nothing(boxed: Boxed) -> None:
    options = boxed()
    line = CommandLine()
    await line.open(options)
    assert options.image is not None
    for seconds in (0.02, 0.1, 0.2):
        starting = asyncio.create_task(line.start(Spec(options.image, options, "/tmp", (8011,))))
        await asyncio.sleep(seconds)
        starting.cancel()
        (done,) = await asyncio.gather(starting, return_exceptions=True)
        if not isinstance(done, BaseException):
            await done.stop()
    await line.close()
    assert not [name for name in names() if f"-{os.getpid()}-" in name]
