"""Cost of the checks of every step, and of recording what updates made of tokens: CPU seconds against whole steps.

    python -m benchmarks.training.checks_cost [--steps 20] [--ranks 2] [key=value ...]

Trains the quickstart's task with a small policy, in this process or, with several ranks, under Ray with a rollout
worker beside them. Prints the shares of the steps' CPU time that the checks took, by the clocks of their threads, and
that recording took: in all processes, while it lasted. CPU time is that of all threads of this process, the ranks and
the rollout worker; Ray's own processes are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import psutil

from agentrl.system.metrics import Numbers
from agentrl.train import training
from agentrl.trainer.observer import Step
from agentrl.trainer.recording import Records
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


class Clocks:
    """CPU seconds of this process with its ranks and rollout workers, and those of Ray's own processes."""

    def __init__(self) -> None:
        children = psutil.Process().children(recursive=True)
        actors = [one.pid for one in children if one.name().startswith("ray::") and "IDLE" not in one.name()]
        self.mine = [os.getpid(), *actors]
        self.others = [one.pid for one in children if one.pid not in self.mine]

    def read(self, pids: list[int]) -> float:
        """Add up; a process that has ended counts nothing."""
        return sum(cpu_seconds(pid) for pid in pids)


def cpu_seconds(pid: int) -> float:
    """Read the CPU clock of a process, to the nanosecond: the number is what `clock_getcpuclockid` makes on Linux."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def measure(folder: Path, steps: int, keys: list[str]) -> Numbers:
    """Train, and return CPU seconds of the steps and of their checks, without those of the first step."""
    recording: list[float] = []
    clocks = Clocks()

    healthy = Records.on_published

    def timed(records: Records, step: Step) -> None:
        begun = clocks.read(clocks.mine)
        try:
            healthy(records, step)
        finally:
            recording.append(clocks.read(clocks.mine) - begun)

    setattr(Records, "on_published", timed)  # noqa: B010 - typed otherwise
    words = [*SMALL, f"trainer.total_training_steps={steps + 1}", f"trainer.default_local_dir={folder}", *keys]
    with training(words) as run:
        iterator = iter(run)
        next(iterator)
        clocks = Clocks()
        recording.clear()
        begun, around, checks, tokens = clocks.read(clocks.mine), clocks.read(clocks.others), 0.0, 0.0
        for _ in range(steps):
            metrics = next(iterator)
            checks += metrics["perf/check_seconds"]
            tokens += metrics["train/policy_tokens"]
        seconds = clocks.read(clocks.mine) - begun
        around = clocks.read(clocks.others) - around
    setattr(Records, "on_published", healthy)  # noqa: B010
    size = sum(path.stat().st_size for path in (folder / UPDATES).glob("*.parquet"))
    return {
        "processes": float(len(clocks.mine)),
        "cpu_seconds": seconds,
        "around": around,
        "checks": checks,
        "recording": sum(recording),
        "policy_tokens": tokens,
        "update_bytes": float(size),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1, help="above 1: under Ray, on the CPU")
    parser.add_argument("keys", nargs="*")
    arguments = parser.parse_args(argv)
    ranks = [f"trainer.n_gpus_per_node={arguments.ranks}", "trainer.device=cpu"] if arguments.ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder) / "with", arguments.steps, [*ranks, *arguments.keys])
    report = {
        "steps": arguments.steps,
        "processes": int(found["processes"]),
        "cpu_seconds_a_step": round(found["cpu_seconds"] / arguments.steps, 4),
        "cpu_seconds_a_step_of_rays_own_processes": round(found["around"] / arguments.steps, 4),
        "checks_share": round(found["checks"] / found["cpu_seconds"], 4),
        "recording_share": round(found["recording"] / found["cpu_seconds"], 4),
        "update_bytes_a_policy_token": round(found["update_bytes"] / max(found["policy_tokens"], 1), 2),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
