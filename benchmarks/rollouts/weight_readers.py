"""Rollout workers that read new weights from two ranks under Ray: all together, and one after the other.

    python -m benchmarks.rollouts.weight_readers

A sharded policy of 62 million parameters in float32, 32 MB at a time, and readers in processes of their own. One reader
alone is the base. Medians; CPU-seconds are of the ranks, the readers and Ray's own processes.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psutil
import ray

from agentrl.config import Config
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.runtime.ray import pool
from agentrl.runtime.ray.pool import WeightReader, ask
from agentrl.workers.roles import open_workers
from benchmarks.no_options import no_options

if TYPE_CHECKING:
    from ray.actor import ActorProxy

SHAPE = TinyShape(hidden=768, heads=24, kv_heads=24, intermediate=2304, layers=8)
READERS = (1, 2, 4)
REPEATS = 7
PART = 8 << 20
"""Elements of a part."""


class Reader:
    """A process that reads weights and keeps none."""

    def read(self, reader: WeightReader) -> int:
        """Read all; the bytes."""
        pool.READ_ELEMENTS = PART
        return sum(tensor.numel() * tensor.element_size() for _, tensor in reader())


def cpu_seconds() -> float:
    """Add up the time of this process's children, those that Ray started among them."""
    times = [process.cpu_times() for process in psutil.Process(os.getpid()).children(recursive=True)]
    return sum(one.user + one.system for one in times)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the CPU-seconds of the work."""
    cpu, begun = cpu_seconds(), time.perf_counter()
    work()
    return time.perf_counter() - begun, cpu_seconds() - cpu


def together(readers: Sequence[ActorProxy[Reader]], reader: WeightReader) -> None:
    """Have all read at once."""
    shared = replace(reader, readers=len(readers))
    ray.get([ask(one, Reader.read, shared) for one in readers])


def in_turn(readers: Sequence[ActorProxy[Reader]], reader: WeightReader) -> None:
    """Have each read when the one before has ended."""
    for one in readers:
        ray.get(ask(one, Reader.read, reader))


def main() -> None:
    no_options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_policy(folder, 1, shape=SHAPE)
        config = Config.model_validate(
            {
                "actor_rollout_ref": {"model": {"path": folder}},
                "trainer": {"n_gpus_per_node": 2, "device": "cpu"},
            }
        )
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        workers = open_workers(config, "cpu", 10)
        try:
            weights = workers.policy.weights().read
            assert isinstance(weights, WeightReader)
            kind = ray.remote(num_cpus=0)(Reader)
            readers: list[ActorProxy[Reader]] = [kind.remote() for _ in range(max(READERS))]
            in_turn(readers, weights)
            print("| readers | together, s | in turn, s | together over one reader | CPU-s: together, in turn |")
            print("|---|---|---|---|---|")
            alone = 0.0
            for count in READERS:
                ways = [partial(way, readers[:count], weights) for way in (together, in_turn)]
                rounds = [[timed(way) for way in ways] for _ in range(REPEATS)]
                (wall, cpu), (turns, turns_cpu) = (
                    [statistics.median(one[way][column] for one in rounds) for column in (0, 1)] for way in (0, 1)
                )
                alone = alone or wall
                print(f"| {count} | {wall:.2f} | {turns:.2f} | {wall / alone:.2f} | {cpu:.2f}, {turns_cpu:.2f} |")
        finally:
            workers.executor.close()
            ray.shutdown()


if __name__ == "__main__":
    main()
