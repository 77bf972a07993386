"""The ranks of one role: one call on each of them, batches handed out, answers put together.

No worker class is known here. A call names its method by the function object
(`ranks.metrics(CriticWorker.update, batch, step=3)`), so that arguments and answers are typed; each rank finds its
worker's own method by that function's name.

The pure functions `shares`, `join_tokens` and `reduce_metrics` define how a batch is handed out and how answers are
joined. So every implementation gives the same results as `LocalRanks`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from agentrl.engines.weights import Adapter, Weights
from agentrl.system.metrics import Numbers
from agentrl.trajectory.batch import RaggedBatch, Sequences, token_places

P = ParamSpec("P")
R = TypeVar("R")
Worker = TypeVar("Worker")
Worker_co = TypeVar("Worker_co", covariant=True)
Batch = TypeVar("Batch", bound=Sequences)


@dataclass(frozen=True, slots=True)
class CachedColumns:
    """Token columns of some sequences, which a rank's worker kept from an earlier call."""

    rows: torch.Tensor  # [n] int64: `RaggedBatch.row` of the sequences
    offsets: torch.Tensor  # [n + 1] int64
    values: torch.Tensor  # [tokens, F] of F columns, [tokens, ...] of one, on the CPU


@dataclass(frozen=True, slots=True)
class RankWeights:
    """One rank's part in reading a model's weights."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the whole model's tensors by their names in checkpoints; the same on every rank."""
    read: Callable[[], Iterator[tuple[str, torch.Tensor | None]]]
    """Reads all tensors of `shapes`, whole, in an order that is the same on every rank.

    The ranks read together, as gathering a tensor may need all of them; None stands for a tensor that another rank
    hands over. They may be live weights, which the next update changes.
    """
    adapter: Adapter | None = None
    """See `Weights.adapter`. The ranks read it together, and each has it whole."""

    def alone(self) -> Weights:
        """All weights, where this rank hands over every one."""
        return Weights(self.shapes, self._all, self.adapter)

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.read():
            if tensor is None:
                raise ValueError(f"{name}: another rank has this weight, and none was asked")
            yield name, tensor


class Ranks(Protocol[Worker_co]):
    """The workers of one role, each with its part of the model."""

    def add_columns(
        self,
        fields: Sequence[str],
        method: Callable[[Worker_co, RaggedBatch], tuple[torch.Tensor, Numbers]],
        batch: Batch,
    ) -> tuple[Batch, Numbers]:
        """Give each rank a share of `batch`, and join the answers: (the batch with the columns `fields`, metrics).

        method: (values for the T tokens of its share, [T, ...] for one field, [T, F] for F fields; metrics over the
        shares of all ranks).
        """
        ...

    def cached_columns(
        self, fields: Sequence[str], method: Callable[[Worker_co], CachedColumns], batch: Batch
    ) -> Batch:
        """Add the F columns [T], or one [T, ...], that the ranks kept of the sequences of `batch`.

        They are NaN for sequences that no rank kept.

        `batch` is the batch that the ranks' workers were given.
        """
        ...

    def metrics(
        self, method: Callable[Concatenate[Worker_co, P], Numbers], *args: P.args, **kwargs: P.kwargs
    ) -> Numbers:
        """Give every rank the same arguments, whole batches among them, and reduce the metrics (`reduce_metrics`)."""
        ...

    def broadcast(self, method: Callable[Concatenate[Worker_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Give every rank the same arguments, and return the answers in the order of the ranks."""
        ...

    def weights(self, method: Callable[[Worker_co], RankWeights]) -> Weights:
        """Join the results of `method` on all ranks: weights that are read from this process."""
        ...


def own_method(worker: Worker, method: Callable[Concatenate[Worker, P], R]) -> Callable[P, R]:
    """Bind to `worker` the `method`, or the override in the worker's class."""
    found: Callable[P, R] = getattr(worker, method.__name__)
    return found


class LocalRanks(Generic[Worker]):
    """One worker in this process, whose share is the whole batch. Implements `Ranks`."""

    def __init__(self, worker: Worker, around: Callable[[str], AbstractContextManager[None]] | None = None) -> None:
        """around: called with each method's name; its context is open while the method runs."""
        self._worker = worker
        self._around = around or (lambda method: nullcontext())

    def add_columns(
        self,
        fields: Sequence[str],
        method: Callable[[Worker, RaggedBatch], tuple[torch.Tensor, Numbers]],
        batch: Batch,
    ) -> tuple[Batch, Numbers]:
        """See `Ranks.add_columns`: the values are [T] for one field, [T, F] for F of them."""
        [(values, metrics)] = self.broadcast(method, batch.load())
        columns = (values,) if len(fields) == 1 else values.unbind(1)
        found = {field: column.contiguous() for field, column in zip(fields, columns, strict=True)}
        return batch.with_fields(**found), metrics

    def cached_columns(self, fields: Sequence[str], method: Callable[[Worker], CachedColumns], batch: Batch) -> Batch:
        [kept] = self.broadcast(method)
        nothing = math.nan if kept.values.is_floating_point() else 0
        values = kept.values.new_full((batch.num_tokens, *kept.values.shape[1:]), nothing)
        starts = batch.lengths.cumsum(0) - batch.lengths
        values[token_places(starts[kept.rows], kept.offsets.diff())] = kept.values
        columns = (values,) if len(fields) == 1 else values.unbind(1)
        return batch.with_fields(**{name: one.contiguous() for name, one in zip(fields, columns, strict=True)})

    def metrics(self, method: Callable[Concatenate[Worker, P], Numbers], *args: P.args, **kwargs: P.kwargs) -> Numbers:
        return self.broadcast(method, *args, **kwargs)[0]

    def broadcast(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        with self._around(method.__name__):
            return [own_method(self._worker, method)(*args, **kwargs)]

    def weights(self, method: Callable[[Worker], RankWeights]) -> Weights:
        return self.broadcast(method)[0].alone()


def shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Split sequences over ranks so that their tokens are about equal; return the indices of each rank, ascending.

    Karmarkar and Karp's largest differencing (1982), for any number of parts. Every sequence begins as a partition of
    its own. The two most uneven partitions become one, again and again: the fullest parts of one join the emptiest of
    the other. Deterministic. With fewer sequences than ranks, some ranks get no sequence.
    """
    count, alone = len(lengths), np.zeros(ranks, dtype=np.int64)
    # An entry is (unevenness, negated: a heap gives the smallest; first sequence; number of the partition; tokens of
    # its parts, fullest first). Which sequences are in a part follows from the merges alone.
    heap = [(-length, index, index, np.append(length, alone[1:])) for index, length in enumerate(lengths)]
    heapq.heapify(heap)
    merges: list[tuple[int, int, npt.NDArray[np.int64]]] = []
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
    """Average each metric over the ranks.

    Workers sum numerators and denominators over the ranks before they divide. So every rank reports the same value, and
    the mean is that value; only times and similar metrics differ.
    """
    return {key: math.fsum(one[key] for one in metrics) / len(metrics) for key in metrics[0]}


def join_tokens(results: Sequence[torch.Tensor], parts: Sequence[Sequence[int]], batch: RaggedBatch) -> torch.Tensor:
    """Join one tensor [tokens, ...] for each part of `batch` into [T, ...] in the order of `batch`.

    parts: sequence indices, disjoint and complete. Raises ValueError when a result has not one entry for each token of
    its part.
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
