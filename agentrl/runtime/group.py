"""The worker group: one call on every worker of a role, with the ragged batch handed out and the results put together.

Handing out is defined by two pure functions, so that every executor gives what `LocalWorkerGroup` gives:
- A method marked `@by_share` is given a share of the batch on each rank (`shares`). What it returns is joined: token
  columns become one of the batch (for `Sequences.with_fields`), dictionaries of numbers one, tuples part by part.
- Any other method is given all sequences on every rank, as an update is, which takes its denominators from what is
  known of them and loads its own share of each mini-batch. Dictionaries of numbers are reduced; anything else must be
  the same on every rank, and the first rank's is returned.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from agentrl.trajectory.batch import RaggedBatch

Method = TypeVar("Method", bound=Callable[..., Any])


def by_share(method: Method) -> Method:
    """Mark a worker's method: each rank is given its share of the batch and answers for its tokens only."""
    method.by_share = True  # type: ignore[attr-defined]
    return method


class WorkerGroup(Protocol):
    """The workers of one role (policy, reference, critic)."""

    def run(self, method: str, batch: Any = None, **kwargs: Any) -> Any:
        """Call `method` on every worker, with its part of `batch` if one is given, and put the results together."""
        ...


class LocalWorkerGroup:
    """The group of one worker in this process: its share is the whole batch, its result is the result."""

    def __init__(self, worker: Any, around: Callable[[str], AbstractContextManager[None]] | None = None) -> None:
        """`around`: is given each method's name, and entered while it runs."""
        self.worker = worker
        self._around = around or (lambda method: nullcontext())

    def run(self, method: str, batch: RaggedBatch | None = None, **kwargs: Any) -> Any:
        bound = getattr(self.worker, method)
        with self._around(method):
            return bound(**kwargs) if batch is None else bound(batch, **kwargs)


def shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Which sequences each rank gets, so that their tokens are about equal: Karmarkar and Karp's largest differencing
    (1982), for any number of parts.

    Every sequence begins as a partition of its own. Again and again the two partitions that are the most uneven become
    one, the fullest parts of one with the emptiest of the other. Deterministic; each share is in ascending order. Ranks
    may get nothing when there are fewer sequences.
    """
    count, alone = len(lengths), np.zeros(ranks, dtype=np.int64)
    # Of each partition: its unevenness, of which a heap gives the largest; the first sequence in it; its number; and
    # the tokens of its parts, fullest first. Which sequences a part has is known by the merges alone.
    heap = [(-length, index, index, np.append(length, alone[1:])) for index, length in enumerate(lengths)]
    heapq.heapify(heap)
    merges: list[tuple[int, int, np.ndarray]] = []
    while len(heap) > 1:
        _, first, one, mine = heapq.heappop(heap)
        _, _, other, theirs = heap[0]
        sums = mine + theirs[::-1]
        by_tokens = np.argsort(-sums, kind="stable")
        sums = sums[by_tokens]
        heapq.heapreplace(heap, (int(sums[-1] - sums[0]), first, count + len(merges), sums))
        merges.append((one, other, by_tokens))
    rank_of = {count + len(merges) - 1: np.arange(ranks)}  # of each part of the last partition, then of those before
    for number, (one, other, by_tokens) in reversed(list(enumerate(merges, count))):
        ends_on = np.empty(ranks, dtype=np.int64)
        ends_on[by_tokens] = rank_of.pop(number)
        rank_of[one], rank_of[other] = ends_on, ends_on[::-1]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for index in range(count):
        parts[rank_of[index][0]].append(index)
    return parts


def reduce_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the ranks.

    Workers sum numerators and denominators over the ranks before they divide, so that every rank reports the same
    value and the mean is that value; only times and the like differ.
    """
    return {key: math.fsum(one[key] for one in metrics) / len(metrics) for key in metrics[0]}


def join_tokens(results: Sequence[torch.Tensor], parts: Sequence[Sequence[int]], batch: RaggedBatch) -> torch.Tensor:
    """[T, ...] in the order of `batch`, from one tensor [tokens, ...] for the sequences of each part.

    Raises ValueError when a result has not one entry for each token of its part.
    """
    joined = torch.empty((batch.num_tokens, *results[0].shape[1:]), dtype=results[0].dtype, device=results[0].device)
    offsets = batch.offsets.tolist()
    for result, part in zip(results, parts, strict=True):
        spans = [(offsets[sequence], offsets[sequence + 1]) for sequence in part]
        tokens = sum(end - start for start, end in spans)
        if tokens != len(result):
            raise ValueError(f"join: {len(result)} entries were returned for a share of {tokens} tokens")
        place = 0
        for start, end in spans:
            joined[start:end] = result[place : place + end - start]
            place += end - start
    return joined
