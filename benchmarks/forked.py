"""Processes that begin at once: forked from one that has imported torch and the trainer."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["agentrl.trainer.step", "agentrl.workers.roles", "agentrl.trainer.run_sft"])


def started(work: Callable[[], None], log: Path) -> ForkServerProcess:
    """Begin the work in a process of its own, whose output goes to the file `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = _context.Process(target=_logged, args=(work, str(log)))
    process.start()
    return process


def forked(work: Callable[[], None], log: Path) -> int:
    """Do the work in a process of its own; returns its exit status."""
    process = started(work, log)
    process.join()
    return process.exitcode or 0


def _logged(work: Callable[[], None], log: str) -> None:
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(opened, stream)
    os.close(opened)
    work()
