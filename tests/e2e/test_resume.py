"""Killed at any moment and started again, a run ends with the numbers of an undisturbed one, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import PROJECT, command
from tests.e2e.test_train import lines

Overrides = Callable[..., list[str]]

TIMES = ("time/", "perf/", "tool/seconds", "trajectory/generate_seconds", "trajectory/tool_seconds")
STEPS = 6


def numbers(run: Path) -> list[dict[str, float]]:
    """The metrics without what a clock says."""
    return [
        {name: value for name, value in line.items() if not name.startswith(TIMES) and "seconds" not in name}
        for line in lines(run)
    ]


def kill_after(arguments: list[str], run: Path, seconds: float, last: int) -> bool:
    """Start a run and SIGKILL it after `seconds`, or after its step `last`; returns whether it was still running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.train", *arguments],
        cwd=run.parent,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None and steps_logged(run) < last:
        time.sleep(0.01)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return running


def steps_logged(run: Path) -> int:
    """By the metrics, whose first line is of step 0."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") - 1 if file.exists() else 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_killed_and_resumed_equals_undisturbed(small_run: Overrides, tmp_path: Path, algorithm: str) -> None:
    def overrides(name: str) -> list[str]:
        more = [f"trainer.total_training_steps={STEPS}", "trainer.test_freq=2", f"algorithm={algorithm}"]
        more.append(f"actor_rollout_ref.actor.checkpoint.async_save={algorithm == 'ppo'}")
        return [
            override
            for override in small_run(*more, run_dir=tmp_path / name)
            if algorithm == "grpo" or "filter_groups" not in override
        ]

    began = time.monotonic()
    whole = command(overrides("whole"), cwd=tmp_path)
    seconds = time.monotonic() - began
    assert whole.returncode == 0, whole.stderr
    rng = random.Random(algorithm)
    killed = tmp_path / "killed"
    for last in (STEPS - 1, STEPS + 1):  # a first run that is much faster than the one before is killed, too
        was_running = kill_after(overrides("killed"), killed, rng.uniform(0.3, 1.0) * seconds, last)
        assert was_running or last > STEPS
    resumed = command(overrides("killed"), cwd=tmp_path)
    if "nothing left to train" not in resumed.stderr:
        assert resumed.returncode == 0, resumed.stderr
    assert numbers(killed) == numbers(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)
