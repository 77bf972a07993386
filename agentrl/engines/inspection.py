"""Engines that can be asked what weights they hold."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from agentrl.engines.contract import RolloutEngine


@runtime_checkable
class InspectableEngine(RolloutEngine, Protocol):
    """An engine whose weights can be compared with those that it was given."""

    async def checksums(self, names: Sequence[str]) -> dict[str, dict[str, tuple[str, str]]]:
        """Compute checksums of the weights that the engine computes with, by their names in checkpoints.

        For each name: by the name of every tensor that must hold this weight, more than one where weights are tied, its
        dtype and its `checksum`. Names that the engine does not know are left out.
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
