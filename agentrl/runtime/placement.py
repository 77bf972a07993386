"""Roles, and the devices of a cluster that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Worker_co = TypeVar("Worker_co", covariant=True)


@dataclass(frozen=True)
class Role(Generic[Worker_co]):
    """One model of a run, and how its worker is made."""

    name: str
    make: Callable[[], Worker_co]
    """Makes the worker, or one rank's part of it where a process group is up. Pickled, and called in that process."""
    copies: int = 1
    """Neighbouring ranks that are given the same share of a batch, and answer the same."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that form one process group and hold their parts of some roles."""

    nnodes: int
    n_gpus_per_node: int
    roles: tuple[Role[object], ...]
    keys: str
    """Section of the config with the keys nnodes and n_gpus_per_node, for messages."""

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.nnodes * self.n_gpus_per_node
