"""Trains a step for each line of its input, and writes the CPU seconds since the step before: `paced.py key=value ...`.

CPU time is that of this process and all that it started.
"""

from __future__ import annotations

import contextlib
import sys

import psutil

from agentrl.train import training

clocks: dict[int, float] = {}


def cpu() -> float:
    """Add up the clocks; a process that has ended keeps its last reading."""
    this = psutil.Process()
    for one in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            clocks[one.pid] = times.user + times.system
    return sum(clocks.values())


with training(sys.argv[1:]) as run:
    steps = iter(run)
    next(steps)
    last = cpu()
    print("CPU 0", flush=True)
    for _ in sys.stdin:
        next(steps)
        now = cpu()
        print(f"CPU {now - last}", flush=True)
        last = now
