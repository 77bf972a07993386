"""Ctrl-C and SIGTERM end running trajectories in good order; a second one ends the run also where they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import PROJECT
from tests.e2e.test_train import lines

LOOP = '''
import asyncio
import time
from pathlib import Path

from agentrl.agent_loop import AgentLoop
from agentrl.trajectory import Status


class Waiting(AgentLoop):
    """From the second step on no trajectory ends."""

    async def run(self, episode):
        episode.start(episode.sample.prompt)
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "status", "hangs"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGINT, 130, True)],
)
def test_a_run_is_ended(
    small_run: Callable[..., list[str]], tmp_path: Path, number: signal.Signals, status: int, hangs: bool
) -> None:
    (tmp_path / "waiting.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text("- {name: waiting, _target_: waiting.Waiting}\n")
    if hangs:
        (tmp_path / "hang").touch()
    agent = "actor_rollout_ref.rollout.agent"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "agentrl.train"),
            *small_run("data.val_files=null", f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml"),
            f"{agent}.default_agent_loop=waiting",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{PROJECT}:{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored by jobs in the background
    )

    def until(file: str) -> None:
        while not (tmp_path / file).exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)

    try:
        until("begun")
        process.send_signal(number)
        until("ended")
        if hangs:
            process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, stderr
    assert "the same command goes on from the last checkpoint" in stderr and "Traceback" not in stderr
    run = tmp_path / "run"
    assert [line["step"] for line in lines(run)] == [1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
    assert [path.name for path in (run / "trajectories").iterdir()] == ["train_000001.parquet"]
