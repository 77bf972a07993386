"""Ctrl-C and SIGTERM end running trajectories in good order; a second one ends the run also where they hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_train import lines
from tests.forked import ForkedPython

LOOP = '''
import asyncio
import time
from pathlib import Path

from agentrl.agent_loop import AgentLoop
from agentrl.trajectory import Status


class Waiting(AgentLoop):
    """From the second step on no trajectory ends."""

    async def run(self, episode):
        await episode.start(episode.sample.prompt)
        await episode.generate()
        if episode.trajectory.uid.startswith("train/2/"):
            Path("begun").touch()
            try:
                await asyncio.sleep(600)
            finally:
                Path("ended").touch()
                if Path("hang").exists():
                    time.sleep(600)
        episode.finish(Status.COMPLETED)
'''


SCRIPT = """
import signal
import sys

from agentrl.train import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.exit(main())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "status", "hangs"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGINT, 130, True)],
)
def test_a_run_is_ended(
    small_run: Callable[..., list[str]], tmp_path: Path, number: signal.Signals, status: int, hangs: bool
) -> None:
    (tmp_path / "waiting.py").write_text(LOOP)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "loops.yaml").write_text("- {name: waiting, _target_: waiting.Waiting}\n")
    if hangs:
        (tmp_path / "hang").touch()
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 2?"}], "data_source": "x"} for n in range(8)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    agent = "actor_rollout_ref.rollout.agent"
    keys = [f"data.train_files={tmp_path}/rows.parquet", "actor_rollout_ref.rollout.multi_turn.tool_config_path=null"]
    keys += [f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml", f"{agent}.default_agent_loop=waiting"]
    run = ForkedPython([tmp_path / "train.py", *small_run("data.val_files=null", *keys)], tmp_path)
    pid = run.process.pid
    assert pid is not None

    def until(file: str) -> None:
        ends = time.monotonic() + 100
        while not (tmp_path / file).exists():
            assert run.process.is_alive() and time.monotonic() < ends, run.wait(0)
            time.sleep(0.05)

    until("begun")
    os.kill(pid, number)
    until("ended")
    if hangs:
        os.kill(pid, number)
    done = run.wait(100)
    assert done.returncode == status, done.stderr
    newest = "the last checkpoint" if hangs else f"{tmp_path}/run/checkpoints/step_000001"
    assert f"the same command goes on from {newest}" in done.stderr
    assert "Traceback" not in done.stderr
    folder = tmp_path / "run"
    assert lines(folder)[-1]["step"] == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000001"]
    assert [path.name for path in (folder / "trajectories").iterdir()] == ["train_000001.parquet"]
