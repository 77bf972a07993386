"""The quickstart on the device: `python -m agentrl.train` as a user runs it, in one process, with the embedded engine.

Each row has the figure of docs/quickstart.md for the same seed on two CPU cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import row, setting
from benchmarks.training.quickstart_seeds import GREEDY, SAMPLED, SEEDS, documented

SEED = SEEDS[0]
STEPS = 30
STAGES = ("step", "rollout", "old_log_prob", "update_actor", "sync_weights")


def read(metrics: Path) -> list[dict[str, Any]]:
    """The steps whose line is whole."""
    if not metrics.exists():
        return []
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def tell(steps: list[dict[str, Any]], warm_up: float, expected: Mapping[str, tuple[float, float]]) -> None:
    """Print rows of a run so far.

    Args:
        warm_up: seconds until its first line.
        expected: success before and after by metric, on a CPU.
    """
    if not steps:
        return
    trained = [step for step in steps if "time/step" in step]
    row("seconds until the first validation is done", seen=warm_up)
    validated = [step for step in steps if SAMPLED in step]
    for name in (SAMPLED, GREEDY):
        label = name.removeprefix("val/").replace("_", ", ")
        before, after = expected.get(name, (None, None))
        row(f"{label} before", seen=validated[0][name], documented_for_a_CPU=before)
        if len(validated) > 1:
            row(f"{label} last", seen=validated[-1][name], documented_for_a_CPU=after)
            row("steps before the last validation", seen=validated[-1]["step"])
    if len(trained) > 1:  # the first one loads and allocates
        row("steps done", seen=len(trained))
        for stage in STAGES:
            row(f"seconds a step, {stage}", seen=median(trained, f"time/{stage}"))
        for name in ("perf/tokens_per_second", "rollout/logprob_gap_max_abs"):
            row(name, seen=median(trained, name))


def median(steps: list[dict[str, Any]], name: str) -> float | None:
    """Median of a metric over all steps but the first; None where none of them has it."""
    found = [step[name] for step in steps[1:] if name in step]
    return statistics.median(found) if found else None


def watch(words: Sequence[str], run: Path, expected: Mapping[str, tuple[float, float]]) -> None:
    """Run a training and print its rows as its steps end. Raises SystemExit when it fails."""
    began, first = time.monotonic(), 0.0
    training = subprocess.Popen([sys.executable, "-m", "agentrl.train", *words, f"trainer.default_local_dir={run}"])
    for steps in followed(training, run / "metrics.jsonl"):
        first = first or time.monotonic() - began
        tell(steps, first, expected)
    row("seconds of the whole job", seen=time.monotonic() - began)
    if training.returncode != 0:
        sys.exit(f"the training ended with status {training.returncode}")


def followed(process: subprocess.Popen[bytes], metrics: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the steps so far whenever there are more of them, until the process has ended."""
    told, ended = 0, False
    while not ended:
        ended = process.poll() is not None
        steps = read(metrics)
        if len(steps) > told:
            told = len(steps)
            yield steps
        if not ended:
            time.sleep(0.5)


def main() -> None:
    asked = setting(__doc__)
    with tempfile.TemporaryDirectory() as name:
        words = [
            f"trainer.device={asked.device}",
            *(f"{key}.seed={SEED}" for key in ("quickstart", "trainer", "data")),
            f"quickstart.dir={name}/assets",
            f"trainer.total_training_steps={2 if asked.tiny else STEPS}",
            *(["data.val_max_samples=16"] if asked.tiny else []),
        ]
        watch(words, Path(name) / "run", {} if asked.tiny else documented(SEED))


if __name__ == "__main__":
    main()
