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


def kill_after(arguments: list[str], cwd: Path, seconds: float) -> bool:
    """Start a run and SIGKILL it; returns whether it was still running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.train", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return running


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
    kills = sum(kill_after(overrides("killed"), tmp_path, rng.uniform(0.3, 1.0) * seconds) for _ in range(3))
    assert kills > 0, "every run ended before it could be killed"
    resumed = command(overrides("killed"), cwd=tmp_path)
    if "nothing left to train" not in resumed.stderr:
        assert resumed.returncode == 0, resumed.stderr
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)
