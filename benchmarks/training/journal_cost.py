"""Cost of ledger and journal, which an asynchronous run keeps: seconds of their threads against whole steps.

    python -m benchmarks.training.journal_cost [--steps 20] [key=value ...]

Trains the quickstart's task with a small policy in this process, async_training.max_staleness=1 and a checkpoint each
step, once without and once with async_training.journal_fsync, and prints the share of the process's CPU time in the
training steps that writing records, batches and new files took, by the clock of the thread that did it, and its
seconds by the wall.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import agentrl.agent_loop.base
import agentrl.rollouts.local
import agentrl.system.call_journal
from agentrl.rollouts.record import Record
from agentrl.system.call_journal import CallJournal
from agentrl.system.metrics import Numbers
from agentrl.train import training
from benchmarks.training.checks_cost import SMALL

WRITES: tuple[tuple[object, str], ...] = (
    (agentrl.rollouts.local, "record_of"),
    (agentrl.agent_loop.base, "request_key"),
    (agentrl.system.call_journal, "digest"),
    (CallJournal, "record"),
    (Record, "answered"),
    (Record, "ended"),
    (Record, "taken"),
    (Record, "saved"),
)
"""Everything that writes a record or an entry, or makes one; what is called within another of them counts once."""


def measure(folder: Path, steps: int, keys: list[str]) -> Numbers:
    """Train; return CPU and wall seconds of the steps, and of what was written, without those of the first step."""
    spent = {"journal_cpu": 0.0, "journal_wall": 0.0, "writes": 0.0}

    inside = threading.local()

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "another", False):
                return work(*args, **kwargs)
            inside.another = True
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                inside.another = False
                spent["journal_cpu"] += time.thread_time() - cpu
                spent["journal_wall"] += time.perf_counter() - wall
                spent["writes"] += 1

        return timing

    words = [*SMALL, "async_training.max_staleness=1", "trainer.save_freq=1", *keys]
    words += [f"trainer.total_training_steps={steps + 1}", f"trainer.default_local_dir={folder}"]
    with ExitStack() as stack:
        for owner, name in WRITES:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name))))
        iterator = iter(stack.enter_context(training(words)))
        next(iterator)
        spent |= dict.fromkeys(spent, 0.0)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            next(iterator)
        return {**spent, "cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def main(argv: list[str] | None = None) -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("keys", nargs="*")
    given = parser.parse_args(argv)
    report = {}
    for name, fsync in (("process", "false"), ("power", "true")):
        with tempfile.TemporaryDirectory() as folder:
            keys = [f"async_training.journal_fsync={fsync}", *given.keys]
            found = measure(Path(folder) / "run", given.steps, keys)
        report[f"survives loss of {name}"] = {
            "cpu_seconds_a_step": round(found["cpu"] / given.steps, 4),
            "cpu_share": round(found["journal_cpu"] / found["cpu"], 4),
            "wall_ms_a_step": round(1000 * found["journal_wall"] / given.steps, 2),
            "writes_a_step": round(found["writes"] / given.steps, 1),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
