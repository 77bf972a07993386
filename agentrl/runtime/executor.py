"""Where a run's workers live: in this process, or on many ranks under Ray. The training loop cannot tell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from agentrl.config import Config, SFTConfig
from agentrl.config.needs import uses_ray
from agentrl.runtime.group import LocalWorkerGroup, WorkerGroup
from agentrl.runtime.placement import pools_of
from agentrl.runtime.profiler import Profile, profiled
from agentrl.runtime.stall import STALL_SECONDS, watched
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.roles import Role, make_worker, roles_of

logger = logging.getLogger(__name__)

Computation = Callable[..., tuple[dict[str, torch.Tensor], Any]]
"""Of a RaggedBatch and further arguments: token columns [T] by field, and anything else."""


class Executor(Protocol):
    """The workers of a run."""

    groups: dict[Role, WorkerGroup]
    """One for each role that the run has."""

    def profile_with(self, profile: Profile | None) -> None:
        """How the calls that follow are profiled; None: not at all."""
        ...

    @property
    def nodes(self) -> Sequence[str]:
        """The Ray nodes that the policy's ranks are on; none without Ray."""
        ...

    def keep(self, batch: RaggedBatch) -> Sequences:
        """The batch as the groups take it."""
        ...

    def compute(self, function: Computation, batch: Any, *arguments: Any) -> tuple[Any, Any]:
        """The batch with the columns that `function` finds for all of it, and what else it returns."""
        ...

    def restart(self) -> None:
        """Make all workers anew, as they were at the start of the run; those that live are ended."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class LocalExecutor:
    """One worker a role, in this process."""

    def __init__(self, config: Config | SFTConfig, device: str, total_steps: int) -> None:
        self._profile: Profile | None = None
        self.groups: dict[Role, WorkerGroup] = {
            role: LocalWorkerGroup(make_worker(role, config, device, total_steps), partial(self._around, role))
            for role in roles_of(config)
        }

    @property
    def nodes(self) -> Sequence[str]:
        return ()

    def profile_with(self, profile: Profile | None) -> None:
        self._profile = profile

    def keep(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def compute(self, function: Computation, batch: RaggedBatch, *arguments: Any) -> tuple[RaggedBatch, Any]:
        columns, rest = function(batch, *arguments)
        return batch.with_fields(**columns), rest

    def restart(self) -> None:
        """Nothing can die but the run itself."""

    def close(self) -> None:
        """What this process holds ends with it."""

    @contextmanager
    def _around(self, role: Role, method: str) -> Iterator[None]:
        with profiled(self._profile, 0), watched(f"{role}.{method}", STALL_SECONDS, logger.warning):
            yield


def open_executor(config: Config | SFTConfig, device: str, total_steps: int) -> Executor:
    """One device: this process; several: Ray, which must be up. Raises UserError."""
    if not uses_ray(config):
        return LocalExecutor(config, device, total_steps)
    from agentrl.runtime.ray.executor import RayExecutor

    factory = partial(make_worker, config=config, device=device, total_steps=total_steps)
    return RayExecutor(pools_of(config), device, factory)
