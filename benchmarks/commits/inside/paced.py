"""Trains as many steps as each line of its input says: `paced.py key=value ...`.

Writes their CPU seconds, of this process and all that it started, and how many of them the steps' checks took.
"""

from __future__ import annotations

import contextlib
import sys
import time

import psutil

from agentrl.train import training

clocks: dict[int, float] = {}


def cpu() -> float:
    """Add up the clocks; a process that has ended keeps its last reading."""
    this = psutil.Process()
    for one in (this, *this.children(recursive=True)):
        with contextlib.suppress(OSError):
            # The process's clock of Linux, in nanoseconds: /proc counts hundredths, of which a tiny step takes ten.
            clocks[one.pid] = time.clock_gettime((~one.pid << 3) | 2)
    return sum(clocks.values())


with training(sys.argv[1:]) as run:
    steps = iter(run)
    next(steps)
    last = cpu()
    print("CPU 0 0", flush=True)
    for line in sys.stdin:
        checks = sum(next(steps)["perf/check_seconds"] for _ in range(int(line)))
        now = cpu()
        print(f"CPU {now - last} {checks}", flush=True)
        last = now
