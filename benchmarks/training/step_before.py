"""A GRPO step of this tree against the same step of an earlier commit: what has the trainer come to cost?

    python -m benchmarks.training.step_before ac971de^ [--steps 15]

Work and policy are those of `benchmarks.training.grpo_step`, rollouts and updates take turns, and so do the two trees,
each in a process of its own: what else the machine does falls on both alike. The ratio is of steps that followed one
another. The earlier commit is checked out into a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.training.grpo_step import PROMPTS, Cost, one_step, questions, trainer, warmed_up_policy

COMMAND = [sys.executable, "-m", "benchmarks.training.grpo_step_ours"]
TREE = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="whatever git takes for one")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, checked_out(given.commit, Path(name) / "before") as before:
        rows = Path(name) / "rows.json"
        rows.write_text(json.dumps(questions((given.steps + 1) * PROMPTS)), encoding="utf-8")
        policy = warmed_up_policy(Path(name))
        costs: dict[str, list[Cost]] = {"before": [], "now": []}
        with (
            trainer(COMMAND, policy, rows, 0.0, before) as old,
            trainer(COMMAND, policy, rows, 0.0, TREE) as new,
        ):
            for step in range(given.steps + 1):
                for key, process in (("before", old), ("now", new)):
                    cost = one_step(process)
                    if step:  # the first one warms up
                        costs[key].append(cost)
    for key, found in costs.items():
        seconds = sorted(one["cpu"] for one in found)
        print(f"{key}: {statistics.median(seconds):.3f} CPU-s a step ({seconds[0]:.3f} to {seconds[-1]:.3f})")
    ratios = [now["cpu"] / old["cpu"] for old, now in zip(costs["before"], costs["now"], strict=True)]
    print(f"now over before: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit of this repository out into a folder. Raises SystemExit for what is none."""
    made = subprocess.run(
        ["git", "worktree", "add", "--detach", str(folder), commit], cwd=TREE, capture_output=True, text=True
    )
    if made.returncode:
        raise SystemExit(f"{commit}: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=TREE, check=True)


if __name__ == "__main__":
    main()
