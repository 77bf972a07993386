"""Ctrl-C and SIGTERM end running trajectories in good order; a second one ends the run also where they hang."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import forked_command
from tests.e2e.test_resume import numbers
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
        if episode.trajectory.uid.startswith("train/2/") and not Path("goes_on").exists():
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
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 2?"}], "data_source": "x"} for n in range(8)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    agent = "actor_rollout_ref.rollout.agent"
    keys = [f"data.train_files={tmp_path}/rows.parquet", "actor_rollout_ref.rollout.multi_turn.tool_config_path=null"]
    keys += [f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml", f"{agent}.default_agent_loop=waiting"]
    run = ForkedPython(["-m", "agentrl.train", *small_run("data.val_files=null", *keys)], tmp_path)
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
    for name in ("trajectories", "updates"):
        assert [path.name for path in (folder / name).iterdir()] == ["train_000001.parquet"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bound", [0, 1])
def test_a_run_that_is_preempted_saves_its_last_step_and_goes_on_exactly(
    small_run: Callable[..., list[str]], tmp_path: Path, bound: int
) -> None:
    """SIGTERM in the rollouts of step 2, when no checkpoint was due yet."""
    (tmp_path / "waiting.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text("- {name: waiting, _target_: waiting.Waiting}\n")
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 2?"}], "data_source": "x"} for n in range(16)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    agent = "actor_rollout_ref.rollout.agent"
    keys = [f"data.train_files={tmp_path}/rows.parquet", "actor_rollout_ref.rollout.multi_turn.tool_config_path=null"]
    keys += [f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml", f"{agent}.default_agent_loop=waiting"]
    keys += ["data.val_files=null", "trainer.save_freq=50", f"async_training.max_staleness={bound}"]

    def arguments(name: str) -> list[str]:
        return small_run(*keys, run_dir=tmp_path / name)

    run = ForkedPython(["-m", "agentrl.train", *arguments("run")], tmp_path)
    ends = time.monotonic() + 100
    metrics = tmp_path / "run" / "metrics.jsonl"
    # With a bound of 1 the second step's prompts are begun in the first one, too.
    while not (tmp_path / "begun").exists() or not metrics.exists() or lines(tmp_path / "run")[-1]["step"] < 1:
        assert run.process.is_alive() and time.monotonic() < ends, run.wait(0)
        time.sleep(0.05)
    assert run.process.pid is not None
    os.kill(run.process.pid, signal.SIGTERM)
    done = run.wait(100)
    assert done.returncode == 143, done.stderr
    assert f"terminated; the same command goes on from {tmp_path}/run/checkpoints/step_000001" in done.stderr
    (tmp_path / "goes_on").touch()
    for name in ("run", "undisturbed"):
        ended = forked_command(arguments(name), tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert ("resumed from" in ended.stdout) == (name == "run")
    again, whole = numbers(tmp_path / "run"), numbers(tmp_path / "undisturbed")
    assert [line["step"] for line in again] == [line["step"] for line in whole] == [1, 2, 3]
    if bound == 0:
        assert again == whole
    else:
        batches = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
        ordinals = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
        assert len(batches) == 3 and sorted(ordinals) == list(range(12))
