"""Killed at any moment and started again, a run ends with the numbers of an undisturbed one, bit for bit."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import forked_command
from tests.e2e.test_train import lines
from tests.forked import ForkedPython

Overrides = Callable[..., list[str]]

TIMES = ("time/", "perf/", "tool/seconds", "trajectory/generate_seconds", "trajectory/tool_seconds")
STEPS = 6
THIRDS = """
from hashlib import sha256

def compute_score(solution_str, ground_truth):
    differs = sha256(str(ground_truth).encode()).digest()[0] % 3 == 0
    return float(differs and len(solution_str) % 2)
"""
"""A scorer by which the answers to some prompts, and to no others, may differ."""


def numbers(run: Path) -> list[dict[str, float]]:
    """The metrics without what a clock says."""
    return [
        {name: value for name, value in line.items() if not name.startswith(TIMES) and "seconds" not in name}
        for line in lines(run)
    ]


def kill_after(arguments: list[str], run: Path, seconds: float, last: int) -> bool:
    """Start a run and SIGKILL it after `seconds`, or after its step `last`; returns whether it was still running."""
    started = ForkedPython(["-m", "agentrl.train", *arguments], run.parent)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and started.process.is_alive() and steps_logged(run) < last:
        time.sleep(0.01)
    started.process.kill()
    return started.wait(30).returncode == -signal.SIGKILL


def steps_logged(run: Path) -> int:
    """By the metrics, whose first line is of step 0."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") - 1 if file.exists() else 0


@pytest.mark.slice(1, "kill")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dapo"])
def test_killed_and_resumed_equals_undisturbed(small_run: Overrides, tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "thirds.py").write_text(THIRDS)
    refilled = [
        f"custom_reward_function.path={tmp_path}/thirds.py",
        "data.gen_batch_size=3",
        "algorithm.filter_groups.refill=true",
        "algorithm.filter_groups.max_num_gen_batches=40",
    ]

    def overrides(name: str) -> list[str]:
        group = "grpo" if algorithm == "dapo" else algorithm
        more = [f"trainer.total_training_steps={STEPS}", "trainer.test_freq=2", f"algorithm={group}"]
        more += refilled if algorithm == "dapo" else []
        more.append(f"actor_rollout_ref.actor.checkpoint.async_save={algorithm == 'ppo'}")
        return [
            override
            for override in small_run(*more, run_dir=tmp_path / name)
            if algorithm != "ppo" or "filter_groups.enable" not in override
        ]

    began = time.monotonic()
    whole = forked_command(overrides("whole"), tmp_path)
    seconds = time.monotonic() - began
    assert whole.returncode == 0, whole.stderr
    rng = random.Random(algorithm)
    killed = tmp_path / "killed"
    for last in (STEPS - 1, STEPS + 1):  # a first run that is much faster than the one before is killed, too
        was_running = kill_after(overrides("killed"), killed, rng.uniform(0.3, 1.0) * seconds, last)
        assert was_running or last > STEPS
    resumed = forked_command(overrides("killed"), tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert numbers(killed) == numbers(tmp_path / "whole")
    if algorithm == "dapo":
        drawn = {line["refill/gen_batches"] for line in numbers(killed)[1:]}
        assert len(drawn) > 1, "steps drew different numbers of generation batches"
    one, other = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)
