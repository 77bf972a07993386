"""The quickstart on the device: `python -m agentrl.train` as a user runs it, in one process, with the embedded engine.

Beside what it comes to stand the figures of docs/quickstart.md for the same seed on two CPU cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import row, setting

DOCUMENTED = {"success_sampled": (0.083, 0.990), "success_greedy": (0.052, 1.0)}
"""Success of seed 1, before and after."""
DOCUMENTED_SECONDS = 236.0
"""Seconds of the whole job."""
STEPS = 30
STAGES = ("step", "rollout", "old_log_prob", "update_actor", "sync_weights")


def read(metrics: Path) -> list[dict[str, Any]]:
    """The steps whose line is whole."""
    if not metrics.exists():
        return []
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def tell(steps: list[dict[str, Any]], warm_up: float) -> None:
    """Rows of a run so far; `warm_up`: seconds until its first line."""
    if not steps:
        return
    trained = [step for step in steps if "time/step" in step]
    row("seconds until the first validation is done", seen=warm_up)
    validated = [step for step in steps if "val/success_sampled" in step]
    for name, (before, after) in DOCUMENTED.items():
        label = name.replace("_", ", ")
        row(f"{label} before", seen=validated[0][f"val/{name}"], documented_for_a_CPU=before)
        if len(validated) > 1:
            row(f"{label} last", seen=validated[-1][f"val/{name}"], documented_for_a_CPU=after)
            row("steps before the last validation", seen=validated[-1]["step"], documented_for_a_CPU=STEPS)
    if len(trained) > 1:  # the first one loads and allocates
        row("steps done", seen=len(trained), documented_for_a_CPU=STEPS)
        for stage in STAGES:
            taken = [step.get(f"time/{stage}", 0.0) for step in trained[1:]]
            row(f"seconds a step, {stage}", seen=statistics.median(taken))
        rates = [step["perf/tokens_per_second"] for step in trained[1:] if "perf/tokens_per_second" in step]
        if rates:
            row("tokens a second", seen=statistics.median(rates))


def main() -> None:
    asked = setting(__doc__)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        words = [
            f"trainer.device={asked.device}",
            f"trainer.default_local_dir={run}",
            f"quickstart.dir={name}/assets",
            f"trainer.total_training_steps={2 if asked.tiny else STEPS}",
            *(["data.val_max_samples=16"] if asked.tiny else []),
        ]
        began, first, told = time.monotonic(), 0.0, 0
        training = subprocess.Popen([sys.executable, "-m", "agentrl.train", *words])
        while True:
            ended = training.poll() is not None
            steps = read(run / "metrics.jsonl")
            first = first or (time.monotonic() - began if steps else 0.0)
            if len(steps) > told:
                told = len(steps)
                tell(steps, first)
            if ended:
                break
            time.sleep(0.5)
        row("seconds of the whole job", seen=time.monotonic() - began, documented_for_a_CPU=DOCUMENTED_SECONDS)
        if training.returncode != 0:
            sys.exit(f"the training ended with status {training.returncode}")


if __name__ == "__main__":
    main()
