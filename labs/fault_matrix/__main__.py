"""Faults, loops and modes, each with each: is a prompt lost, is a fault trained on, is the update another one?

    python -m labs.fault_matrix --out runs/faults [--only NAME ...] [--loops react] [--slow] [--document]

Every cell is a training of the real command with a tiny policy that meets one fault. Afterwards its files are judged:
each prompt is in one step, with all its trajectories, and has one status in the ledger; no score is of a fault, and
nothing that failed is trained on; log-probs, advantages, gradient and weights are those that plain torch makes of the
recorded trajectories. A cell that a fault ends goes on by the same command. What has passed is not run again.

Exits with 1 where a cell failed. `--document` writes the table into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

# Before torch is imported: cells run side by side, and spinning threads would eat the processors.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}


def main() -> int:
    from labs.fault_matrix.assets import LOOPS
    from labs.fault_matrix.cells import BOUNDS, cells, outcome, run
    from labs.fault_matrix.faults import FAULTS
    from labs.fault_matrix.page import document, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where cells, and what came of them, stay")
    parser.add_argument("--only", nargs="+", metavar="FAULT", choices=[one.name for one in FAULTS])
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--modes", nargs="+", choices=list(BOUNDS), default=list(BOUNDS))
    parser.add_argument("--sample", type=int, help="only so many cells, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="the cells under Ray, minutes each, not the others")
    parser.add_argument("--processes", type=int, default=2, help="cells at a time")
    parser.add_argument("--document", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # for what is ended with it
    chosen = [
        one
        for one in cells()
        if (one.fault.name in given.only if given.only else one.fault.slow == given.slow)
        and one.loop in given.loops
        and one.mode in given.modes
    ]
    if given.sample is not None:
        applying = [one for one in chosen if one.fault.does_not_apply(one.loop) is None]
        chosen = random.Random(given.seed).sample(applying, given.sample)
    with nullcontext(given.out) if given.out else TemporaryDirectory() as place:
        out = Path(place).absolute()
        run(chosen, out, given.processes)
        print("\n".join(table(out)))
        if given.document:
            document(out, Path("docs/reliability.md"))
        return int(any(outcome(one, out).state == "failed" for one in chosen))


if __name__ == "__main__":
    sys.exit(main())
