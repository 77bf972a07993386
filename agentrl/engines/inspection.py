"""Engines that can be asked what weights they hold."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from agentrl.engines.contract import RolloutEngine


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor of an engine that is not the weight that it was sent."""

    weight: str
    """Name of the weight, and what it is tied to."""
    place: str
    """Name of the engine's tensor, and of its server."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison of sent weights with an engine's tensors."""

    compared: int
    """Tensors that were compared, those of each server counted: without any, no differences say nothing."""
    differences: list[Difference]


@runtime_checkable
class InspectableEngine(RolloutEngine, Protocol):
    """An engine whose weights can be compared with the weights that were sent."""

    def held_in(self, name: str) -> str | None:
        """Name the engine's own tensor that holds a weight; weights of one tensor are compared together.

        None: the engine has shown that this weight cannot be compared.
        """
        ...

    async def compare(self, sent: Mapping[str, torch.Tensor], names: Collection[str]) -> Comparison:
        """Compare weights [S] that were sent with the weights that the engine computes with.

        `names`: all weights' names. Members of `sent` that the engine does not know are left out.
        """
        ...


def checksum(tensor: torch.Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes [S], in its own dtype, as hexadecimal digits."""
    data = tensor.detach().cpu().flatten().contiguous().view(torch.uint8)
    return f"{zlib.crc32(data.numpy().data):08x}"


SAMPLED = 1024
"""Numbers of a tensor that `sample_checksum` reads, about."""


def sample_checksum(tensor: torch.Tensor) -> str:
    """Return the `checksum` of numbers spread evenly over a tensor [S], and of its shape."""
    flat = tensor.detach().flatten()
    return f"{checksum(flat[:: max(1, len(flat) // SAMPLED)])}-{len(flat)}"
