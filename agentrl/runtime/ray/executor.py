"""Workers on many ranks: Ray actors, a process group for each pool of them.

The driver holds references and numbers by sequence (`StoredBatch`); what is by token lies in Ray's object store, and
each rank loads what it works on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentrl.engines.weights import Weights
from agentrl.runtime.group import WorkerGroup, reduce_metrics, shares
from agentrl.runtime.placement import Pool
from agentrl.runtime.profiler import Profile
from agentrl.runtime.ray.pool import RankPool
from agentrl.runtime.ray.rank import Kept, Shapes
from agentrl.runtime.ray.stored import Column, StoredBatch, put_batch
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.roles import WORKERS, Role


class RayExecutor:
    """See the module. Ray must be up."""

    def __init__(self, pools: Sequence[Pool], device: str, make_worker: Callable[[Role], Any]) -> None:
        """Raises ConfigError when the cluster has no room, or a rank refuses the config."""
        self.pools: list[RankPool] = []
        try:
            for pool in pools:
                self.pools.append(RankPool(pool, device, make_worker))
        except BaseException:
            self.close()
            raise
        self.groups: dict[Role, WorkerGroup] = {
            role: RayWorkerGroup(pool, role) for pool in self.pools for role in pool.pool.roles
        }

    @property
    def nodes(self) -> Sequence[str]:
        pool = self.pools[0]
        return [place.node for place in pool.places[:: pool.pool.n_gpus_per_node]]

    def profile_with(self, profile: Profile | None) -> None:
        for pool in self.pools:
            pool.profile = profile

    def keep(self, batch: RaggedBatch) -> StoredBatch:
        return StoredBatch.of([put_batch(batch)])

    def compute(
        self, function: Callable[..., tuple[dict[str, torch.Tensor], Any]], batch: StoredBatch, *arguments: Any
    ) -> tuple[StoredBatch, Any]:
        """On the first rank, for a moment with all tokens."""
        columns, rest = self.pools[0].first("compute", function, batch, arguments)
        everything = range(len(batch))
        return batch.with_fields(
            **{name: batch.column([(kept.ref, everything)]) for name, kept in columns.items()}
        ), rest

    def restart(self) -> None:
        for pool in self.pools:
            pool.restart()

    def close(self) -> None:
        for pool in self.pools:
            pool.stop()


class RayWorkerGroup:
    """The workers of one role over all ranks; see `agentrl.runtime.group` for what it gives."""

    def __init__(self, pool: RankPool, role: Role) -> None:
        self.pool, self.role = pool, role
        self._by_share = by_share_methods(role)

    def run(self, method: str, batch: StoredBatch | None = None, **kwargs: Any) -> Any:
        ranks, copies = self.pool.ranks, self.pool.pool.copies[self.role]
        if batch is not None and method in self._by_share:
            parts = shares(batch.lengths.tolist(), ranks // copies)
            handed = [batch.select(part) for part in parts for _ in range(copies)]
            answers = self.pool.each(self.role, method, handed, True, kwargs)
            return _joined(answers[::copies], parts, batch)
        answers = self.pool.each(self.role, method, [batch] * ranks, False, kwargs)
        first = answers[0]
        if isinstance(first, Shapes):
            return Weights(first.shapes, self.pool.reader(self.role))
        return reduce_metrics(answers) if isinstance(first, dict) else first


def by_share_methods(role: Role) -> frozenset[str]:
    """The methods of a role's worker that are marked `@by_share`."""
    worker = WORKERS[role]
    return frozenset(name for name in dir(worker) if getattr(getattr(worker, name), "by_share", False))


def _joined(answers: Sequence[Any], parts: Sequence[Sequence[int]], batch: StoredBatch) -> Any:
    """What the ranks returned for the shares `parts` of `batch` as one: token columns, numbers, or tuples of them."""
    first = answers[0]
    if isinstance(first, Kept):
        column: Column = batch.column((kept.ref, part) for kept, part in zip(answers, parts, strict=True))
        return column
    if isinstance(first, tuple):
        return tuple(_joined(column, parts, batch) for column in zip(*answers, strict=True))
    return reduce_metrics(answers) if isinstance(first, dict) else first
