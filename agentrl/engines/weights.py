"""A policy's weights on their way to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Weights:
    """Names and shapes of weights, and a function that reads them one tensor at a time, as often as needed.

    An engine checks `shapes` before it changes anything, and reads again for a server that has restarted. So a
    sharded policy is never gathered whole.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """By their names in checkpoints (see `CheckpointNames`). A tied weight may come under one or all of its names."""
    read: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Yields (name, tensor). The tensors may be live weights, which the next update of the policy changes."""

    @classmethod
    def from_tensors(cls, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        """Wrap tensors [S] in memory, each of any shape S and dtype."""
        tensors = dict(named_tensors)
        return cls({name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda: iter(tensors.items()))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Cost of one weight update."""

    bytes: int
    """Bytes of weights that the engine was given."""
    seconds: float
