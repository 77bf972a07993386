"""Cost of the checks of every step, and of recording what updates made of tokens: CPU seconds against whole steps.

    python -m benchmarks.training.checks_cost [--steps 20] [key=value ...]

Trains the quickstart's task with a small policy in this process, and prints the shares of the process's CPU time in the
training steps that the checks took, by their own clocks, and that recording took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import agentrl.trainer.grpo as loop
from agentrl.system.metrics import Numbers
from agentrl.train import training
from agentrl.trainer.recording import record_update
from agentrl.trajectory.files import UPDATES

SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "quickstart.train_rows=256",
    "data.val_files=null",
    "trainer.show_trajectory_freq=-1",
    "trainer.resume_mode=disable",
)


def measure(folder: Path, steps: int, keys: list[str]) -> Numbers:
    """Train, and return CPU seconds of the steps and of their checks, without those of the first step."""
    recording: list[float] = []

    def timed(*args: object, **kwargs: object) -> object:
        begun = time.process_time()
        try:
            return record_update(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            recording.append(time.process_time() - begun)

    setattr(loop, "record_update", timed)  # noqa: B010 - typed otherwise
    words = [*SMALL, f"trainer.total_training_steps={steps + 1}", f"trainer.default_local_dir={folder}", *keys]
    with training(words) as run:
        iterator = iter(run)
        next(iterator)
        recording.clear()
        begun, checks, tokens = time.process_time(), 0.0, 0.0
        for _ in range(steps):
            metrics = next(iterator)
            checks += metrics["perf/check_seconds"]
            tokens += metrics["train/policy_tokens"]
        seconds = time.process_time() - begun
    setattr(loop, "record_update", record_update)  # noqa: B010
    size = sum(path.stat().st_size for path in (folder / UPDATES).glob("*.parquet"))
    return {
        "cpu_seconds": seconds,
        "checks": checks,
        "recording": sum(recording),
        "policy_tokens": tokens,
        "update_bytes": float(size),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("keys", nargs="*")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder) / "with", arguments.steps, arguments.keys)
    report = {
        "steps": arguments.steps,
        "cpu_seconds_a_step": round(found["cpu_seconds"] / arguments.steps, 4),
        "checks_share": round(found["checks"] / found["cpu_seconds"], 4),
        "recording_share": round(found["recording"] / found["cpu_seconds"], 4),
        "update_bytes_a_policy_token": round(found["update_bytes"] / max(found["policy_tokens"], 1), 2),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
