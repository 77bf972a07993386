"""Estimators with the plain loss, losses and corrections with GRPO, on two tiny tasks: which learns from how much?

    python -m labs.arena --out runs/arena [--only grpo gigpo] [--tasks calls walk] [--seeds 1] [--document]

`calls` is the quickstart's task: one or two tool calls, a reward for the answer. `walk` is an errand of 4 to 10 turns
with one reward at its end (examples/gigpo/walk.py). Each run is 20 steps of 32 prompts and 8 trajectories, or of 256
prompts where they are not compared, from the same warmed-up policy. What is finished is not run again. Prints a table;
--document writes it, and the picture, into docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from labs.arena.contenders import CONTENDERS
from labs.arena.page import document, table
from labs.arena.runs import TASKS, Match, finish


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/arena"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[one.name for one in CONTENDERS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--document", action="store_true")
    given = parser.parse_args()
    chosen = [one for one in CONTENDERS if not given.only or one.name in given.only]
    tasks, steps = given.tasks, given.steps
    matches = [Match(task, contender, seed, steps) for seed in given.seeds for task in tasks for contender in chosen]
    failed = finish(matches, given.out, given.processes)
    lines = table(matches, given.out)
    print("\n".join(lines))
    if given.document:
        document(matches, given.out, Path("docs"))
    for match in failed:
        print(f"failed: {match.label}, see {match.folder(given.out).with_suffix('.log')}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
