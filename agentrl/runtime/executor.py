"""Executors of a run's workers: in this process, or on many ranks under Ray, alike for the training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

from agentrl.runtime.placement import Pool, Role
from agentrl.runtime.profiler import Profile, nvtx_range, profiled
from agentrl.runtime.ranks import Batch, LocalRanks, Ranks
from agentrl.runtime.stall import STALL_SECONDS, watched
from agentrl.system.reporter import Reporter
from agentrl.trajectory.batch import RaggedBatch, Sequences

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Worker = TypeVar("Worker")
Columns = dict[str, torch.Tensor]
"""Columns of a `RaggedBatch` by name: [T] by token, [N] by sequence."""


class Executor(Protocol):
    """The processes of a run's workers."""

    def ranks(self, role: Role[Worker]) -> Ranks[Worker]:
        """Return the workers of a role that the executor was opened with."""
        ...

    def profile_with(self, profile: Profile | None) -> None:
        """Profile the calls that follow; None: do not."""
        ...

    @property
    def nodes(self) -> Sequence[str]:
        """Ids of the Ray nodes with ranks of the first pool; empty without Ray."""
        ...

    def keep(self, batch: RaggedBatch) -> Sequences:
        """Put a batch where the workers are."""
        ...

    def compute(
        self,
        function: Callable[Concatenate[RaggedBatch, P], tuple[Columns, R]],
        batch: Batch,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[Batch, R]:
        """Call `function` once, with all tokens of the batch; return the batch with its columns, and its result."""
        ...

    def restart(self) -> None:
        """End all workers that live, and make all of them again, as they were at the start of the run."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class LocalExecutor:
    """One worker a role, in this process. Implements `Executor`."""

    def __init__(self, roles: Sequence[Role[object]]) -> None:
        self._profile: Profile | None = None
        self._workers = {role.name: role.make() for role in roles}

    def ranks(self, role: Role[Worker]) -> LocalRanks[Worker]:
        worker = cast(Worker, self._workers[role.name])  # what role.make() returned
        return LocalRanks(worker, partial(self._around, role.name))

    @property
    def nodes(self) -> Sequence[str]:
        return ()

    def profile_with(self, profile: Profile | None) -> None:
        self._profile = profile

    def keep(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def compute(
        self,
        function: Callable[Concatenate[RaggedBatch, P], tuple[Columns, R]],
        batch: Batch,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[Batch, R]:
        columns, result = function(batch.load(), *args, **kwargs)
        return batch.with_fields(**columns), result

    def restart(self) -> None:
        """Do nothing: a worker of this process dies only with the run."""

    def close(self) -> None:
        """Do nothing: resources of this process end with it."""

    @contextmanager
    def _around(self, role: str, method: str) -> Iterator[None]:
        name = f"{role}.{method}"
        watch = watched(f"{name} has taken", STALL_SECONDS, logger.warning)
        with profiled(self._profile, 0), nvtx_range(name), watch:
            yield


def open_executor(pools: Sequence[Pool], device: str, *, on_ray: bool, reporter: Reporter | None = None) -> Executor:
    """Make the workers of all roles: in this process, or under Ray, which must be up.

    reporter: shown what ranks under Ray load. Raises UserError.
    """
    if not on_ray:
        return LocalExecutor([role for pool in pools for role in pool.roles])
    from agentrl.runtime.ray.executor import RayExecutor

    return RayExecutor(pools, device, reporter)
