"""Workers on many ranks: Ray actors, a process group for each pool of them.

The driver holds references and numbers by sequence (`StoredBatch`); token columns lie in Ray's object store, and each
rank loads the sequences that it works on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch

from agentrl.engines.weights import Weights
from agentrl.runtime.placement import Pool, Role
from agentrl.runtime.profiler import Profile
from agentrl.runtime.ranks import Batch, CachedColumns, RankWeights, reduce_metrics, shares
from agentrl.runtime.ray.pool import RankPool
from agentrl.runtime.ray.rank import Rank
from agentrl.runtime.ray.stored import Column, Piece, StoredBatch, put_batch
from agentrl.system.metrics import Numbers
from agentrl.system.reporter import Reporter
from agentrl.trajectory.batch import RaggedBatch, Sequences

P = ParamSpec("P")
R = TypeVar("R")
Worker = TypeVar("Worker")


class RayExecutor:
    """The ranks of all pools. Implements `Executor`; Ray must be up."""

    def __init__(self, pools: Sequence[Pool], device: str, reporter: Reporter | None = None) -> None:
        """Make the ranks, and show `reporter` what they load.

        Raises ConfigError when the cluster has no room, or a rank refuses the config.
        """
        self.pools: list[RankPool] = []
        try:
            for pool in pools:
                self.pools.append(RankPool(pool, device, reporter))
        except BaseException:
            self.close()
            raise

    def ranks(self, role: Role[Worker]) -> RayRanks[Worker]:
        pool = next(pool for pool in self.pools if any(one.name == role.name for one in pool.pool.roles))
        return RayRanks(pool, role)

    @property
    def nodes(self) -> Sequence[str]:
        pool = self.pools[0]
        return [place.node for place in pool.places[:: pool.pool.n_gpus_per_node]]

    def profile_with(self, profile: Profile | None) -> None:
        for pool in self.pools:
            pool.profile = profile

    def keep(self, batch: RaggedBatch) -> StoredBatch:
        return put_batch(batch)

    def compute(
        self,
        function: Callable[Concatenate[RaggedBatch, P], tuple[dict[str, torch.Tensor], R]],
        batch: Batch,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[Batch, R]:
        """Run `Executor.compute`, which makes columns [T] or [N], on the first rank of the first pool."""
        stored, everything = _stored(batch), range(len(batch))
        columns, result = self.pools[0].first(Rank.compute, function, stored, *args, **kwargs)
        added = {
            name: found if isinstance(found, torch.Tensor) else stored.column([(found, everything)])
            for name, found in columns.items()
        }
        return batch.with_fields(**added), result

    def restart(self) -> None:
        for pool in self.pools:
            pool.restart()

    def close(self) -> None:
        for pool in self.pools:
            pool.stop()


class RayRanks(Generic[Worker]):
    """The workers of one role on all ranks of its pool. Implements `Ranks`."""

    def __init__(self, pool: RankPool, role: Role[Worker]) -> None:
        self._pool, self._role = pool, role

    def add_columns(
        self,
        fields: Sequence[str],
        method: Callable[[Worker, RaggedBatch], tuple[torch.Tensor, Numbers]],
        batch: Batch,
    ) -> tuple[Batch, Numbers]:
        """See `Ranks.add_columns`: the values are [T] for one field, [T, F] for F of them."""
        stored, copies = _stored(batch), self._role.copies
        parts = shares(stored.lengths.tolist(), self._pool.pool.ranks // copies)
        handed = [stored.select(part) for part in parts for _ in range(copies)]
        answers = self._pool.column(self._role.name, method.__name__, handed)[::copies]
        column = stored.column((ref, part) for (ref, _), part in zip(answers, parts, strict=True))
        several = len(fields) > 1
        columns = {field: replace(column, place=place if several else None) for place, field in enumerate(fields)}
        return batch.with_fields(**columns), reduce_metrics([metrics for _, metrics in answers])

    def cached_columns(self, fields: Sequence[str], method: Callable[[Worker], CachedColumns], batch: Batch) -> Batch:
        """See `Ranks.cached_columns`: the values go to the object store, never through the driver."""
        answers = self._pool.kept(self._role.name, method.__name__)[:: self._role.copies]
        pieces = tuple(Piece(ref, rows) for ref, rows in answers)
        several = len(fields) > 1
        return batch.with_fields(
            **{name: Column(pieces, place if several else None) for place, name in enumerate(fields)}
        )

    def metrics(self, method: Callable[Concatenate[Worker, P], Numbers], *args: P.args, **kwargs: P.kwargs) -> Numbers:
        return reduce_metrics(self.broadcast(method, *args, **kwargs))

    def broadcast(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._pool.call(self._role.name, method, *args, **kwargs)

    def weights(self, method: Callable[[Worker], RankWeights]) -> Weights:
        shapes, adapter = self._pool.weights(self._role.name, method.__name__)
        return Weights(shapes, self._pool.reader(self._role.name), adapter)


def _stored(batch: Sequences) -> StoredBatch:
    """Narrow a batch to the type that `RayExecutor.keep` and the rollouts under Ray give."""
    if not isinstance(batch, StoredBatch):
        raise TypeError(f"ranks under Ray take a StoredBatch (see RayExecutor.keep), found a {type(batch).__name__}")
    return batch
