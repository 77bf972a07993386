"""The weights of a policy as an engine is given them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Weights:
    """What there is, and a way to get it one tensor at a time, as often as an engine needs it.

    An engine checks `shapes` before it changes anything, and reads again when one of its servers was started anew; so
    a sharded policy need never be gathered whole.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """By their names in checkpoints (see `CheckpointNames`). A tied weight may come under one or all of its names."""
    read: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """The tensors, by name. They may be live weights, which the next update of the policy changes."""

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        """Of tensors at hand."""
        tensors = dict(named_tensors)
        return cls({name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda: iter(tensors.items()))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What giving an engine new weights cost."""

    bytes: int
    """Bytes of weights that the engine was given."""
    seconds: float
