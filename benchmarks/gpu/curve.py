"""SmolLM2-135M on GSM8K with the calculator: `examples/smollm2/gsm8k_gpu.sh`, which goes on where it was stopped.

`--model` is the folder of SmolLM2-135M-Instruct, `--gsm8k` the folder with train.jsonl and test.jsonl. Warm-up,
training and its checkpoints stay in runs/smollm2 of the checkout, so that the next call of the kit continues there.
Success is that of the whole test set of 1,319 problems, greedily, before training and after each 20 steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Setting, options, row, setting_of
from benchmarks.gpu.quickstart import followed, median

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = Path("examples/smollm2/gsm8k_gpu.sh")
RESULTS = ("val/success_greedy", "success/rate", "reward/mean")
"""Metrics of which the first and the last value are shown."""


def tell(steps: list[dict[str, Any]]) -> None:
    """Print rows of a run so far."""
    trained = [step for step in steps if "time/step" in step]
    row("steps done", seen=len(trained))
    for name in RESULTS:
        found = [(step["step"], step[name]) for step in steps if name in step]
        if found:
            row(f"{name}, first", seen=found[0][1], step=found[0][0])
            row(f"{name}, last", seen=found[-1][1], step=found[-1][0])
    if len(trained) > 1:
        for stage in ("step", "rollout", "update_actor"):
            row(f"seconds a step, {stage}", seen=median(trained, f"time/{stage}"))


def run(asked: Setting, source: Path, root: Path) -> None:
    """Run the script in a checkout, and print its rows as steps end. Raises SystemExit when it fails."""
    model, seed = root / "runs/smollm2/model", 2 if asked.tiny else 1
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        model.symlink_to(Path(asked.model).absolute())
    less = ["data.val_max_samples=4", "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    words = [
        f"trainer.device={asked.device}",
        "trainer.save_freq=10",  # a call of ten minutes ends in the middle
        *([*less, "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2"] if asked.tiny else []),
    ]
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    began = time.monotonic()
    script = subprocess.Popen(
        ["bash", str(SCRIPT), str(source.absolute()), *words],
        cwd=root,
        env={**os.environ, "PATH": search, "SEED": str(seed), **({"SOLUTIONS": "32"} if asked.tiny else {})},
    )
    metrics = root / f"runs/smollm2/gsm8k_gpu/seed-{seed}/metrics.jsonl"
    for steps in followed(script, metrics):
        tell(steps)
    row("seconds of this call", seen=time.monotonic() - began)
    if script.returncode != 0:
        sys.exit(f"{SCRIPT} ended with status {script.returncode}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder of train.jsonl and test.jsonl")
    given = parser.parse_args()
    run(setting_of(given), given.gsm8k, PROJECT)


if __name__ == "__main__":
    main()
