"""The most anonymous memory that a piece of work held, by sampling: what maps files does not count."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from agentrl.parallel.offload import give_back

_PERIOD = 0.002  # seconds


class Peak:
    """Bytes above what the process held before."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the work inside, after memory that earlier work freed is given back to the system."""
    give_back(torch.device("cpu"))
    peak, before, done = Peak(), _held(), threading.Event()

    def watch() -> None:
        while not done.wait(_PERIOD):
            peak.bytes = max(peak.bytes, _held() - before)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield peak
    finally:
        done.set()
        watching.join()


def _held() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux")
