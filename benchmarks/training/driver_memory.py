"""How the driver's memory grows with a step's batch under Ray: holding references, and holding the batch.

    python -m benchmarks.training.driver_memory [--sequences 512] [--times 1 4 16]

Real Ray: an actor makes the batch, two ranks load their shares and answer with a column, three times; the driver plans
and hands out. References: the driver has a `StoredBatch`, as in a training. Batch: the driver fetches all tokens, sends
each rank its share, and puts the answers together. Each is a process of its own; its growth is the kernel's peak
(VmHWM) less that after a first batch of eight sequences.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
import torch

from agentrl.runtime.ranks import join_tokens, shares
from agentrl.runtime.ray.session import start_ray
from agentrl.runtime.ray.stored import StoredBatch, put_batch, put_column
from agentrl.trajectory.batch import RaggedBatch
from benchmarks.training.made_batches import GROUP, ragged_batch

RANKS = 2
COLUMNS = ("old_logprobs", "ref_logprobs", "advantages")


@ray.remote(num_cpus=0)
class Worker:
    """Rollouts and a rank."""

    def make(self, sequences: int, stored: bool) -> Any:
        batch, _ = ragged_batch(sequences)
        return put_batch(batch) if stored else batch

    def stored(self, share: StoredBatch) -> Any:
        batch = share.load()
        return put_column(torch.zeros(batch.num_tokens), batch)

    def whole(self, share: RaggedBatch) -> torch.Tensor:
        return torch.zeros(share.num_tokens)


def by_reference(sequences: int, rollouts: Any, ranks: list[Any]) -> None:
    """Pass references to stored shares of the batch between the workers, as a training does."""
    stored = ray.get(rollouts.make.remote(sequences, True))
    parts = shares(stored.lengths.tolist(), len(ranks))
    for column in COLUMNS:
        calls = [rank.stored.remote(stored.select(part)) for rank, part in zip(ranks, parts, strict=True)]
        stored = stored.with_fields(**{column: stored.column(zip(ray.get(calls), parts, strict=True))})


def with_tokens(sequences: int, rollouts: Any, ranks: list[Any]) -> None:
    """Pass all tokens through this process."""
    batch: RaggedBatch = ray.get(rollouts.make.remote(sequences, False))
    parts = shares(batch.lengths.tolist(), len(ranks))
    for column in COLUMNS:
        calls = [rank.whole.remote(ray.put(batch.select(part))) for rank, part in zip(ranks, parts, strict=True)]
        batch = batch.with_fields(**{column: join_tokens(ray.get(calls), parts, batch)})


WAYS = {"references": by_reference, "batch": with_tokens}


def drive(way: str, sequences: int) -> None:
    """Print the bytes by which this process's peak grew. Runs in a process of its own."""
    torch.set_num_threads(1)
    start_ray(None, 1 + RANKS)
    try:
        rollouts, *ranks = (Worker.remote() for _ in range(1 + RANKS))  # type: ignore[attr-defined]
        WAYS[way](GROUP, rollouts, ranks)
        before = peak()
        WAYS[way](sequences, rollouts, ranks)
        print(peak() - before)
    finally:
        ray.shutdown()


def peak() -> int:
    """Bytes of memory that this process had at most, pages of the object store that it mapped included."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drive", nargs=2, metavar=("WAY", "SEQUENCES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(given.drive[0], int(given.drive[1]))
        return
    print("| tokens | references, MB | batch, MB |\n|---|---|---|", flush=True)
    for times in given.times:
        tokens = ragged_batch(times * given.sequences)[0].num_tokens
        command = [sys.executable, "-m", "benchmarks.training.driver_memory", "--drive"]
        grown = [int(subprocess.run([*command, way, str(times * given.sequences)], **CAUGHT).stdout) for way in WAYS]
        print(f"| {tokens:,} | {' | '.join(f'{size / 1e6:.1f}' for size in grown)} |", flush=True)


CAUGHT: dict[str, Any] = {"check": True, "stdout": subprocess.PIPE, "text": True}

if __name__ == "__main__":
    main()
