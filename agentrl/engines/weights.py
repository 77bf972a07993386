"""A policy's weights on their way to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.system.json_value import JSON

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA's matrices, for an engine that serves them next to the weights that they adapt."""

    config: Mapping[str, JSON]
    """Content of peft's adapter_config.json."""
    shapes: Mapping[str, tuple[int, ...]]
    """By peft's names: `lora_A` [R, I] and `lora_B` [O, R] of a weight [O, I]."""
    read: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Yields (name, tensor) in float32. The tensors may be live weights."""


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
    adapter: Adapter | None = None
    """Adapter of the weights, which then never change; None: adapters, if any, are merged into them."""

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
