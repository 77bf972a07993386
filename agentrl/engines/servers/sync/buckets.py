"""Weights packed into one reused buffer, bucket by bucket.

Only the buffer and one more tensor are held at a time, however large the policy is. Tensors lie in the buffer one after
the other, without gaps and all in one dtype, so that each is aligned.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in a bucket; `start` and `end` are bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together. Its data is overwritten when the next bucket is asked for."""

    entries: list[Entry]
    data: torch.Tensor
    """[B] uint8, a view of the buffer."""
    last: bool
    """True for the last bucket of an update."""

    def tensor(self, entry: Entry) -> torch.Tensor:
        """Return the tensor [S] of one entry, a view of the buffer in the entry's shape S and dtype."""
        return self.data[entry.start : entry.end].view(entry.dtype).view(entry.shape)


def buffer_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, bucket_bytes: int) -> int:
    """Size of the buffer for `buckets`: `bucket_bytes`, less if all weights are smaller, more for a larger tensor."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes.values()]
    return max(min(bucket_bytes, sum(sizes)), max(sizes, default=0))


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], buffer: torch.Tensor, bucket_bytes: int, dtype: torch.dtype
) -> Iterator[Bucket]:
    """Fill `buffer` [B] uint8 with one bucket of tensors after the other, in their order.

    A bucket has at most `bucket_bytes`; a larger tensor is a bucket of its own. Tensors [S] may have any shape S and
    floating-point dtype; values are converted to `dtype` and to the buffer's device. Raises ValueError for a tensor
    that is not floating-point, that comes twice, or that is larger than the buffer.
    """
    limit = min(bucket_bytes, buffer.numel())
    entries: list[Entry] = []
    names: set[str] = set()
    used = 0
    for name, tensor in tensors:
        size = tensor.numel() * dtype.itemsize
        check_weight(name, tensor, names)
        names.add(name)
        if size > buffer.numel():
            raise ValueError(
                f"weight {name} {tuple(tensor.shape)} has {size} bytes but the buffer was made for {buffer.numel()}: "
                "its shape is not the one that was announced"
            )
        if entries and used + size > limit:
            yield Bucket(entries, buffer[:used], last=False)
            entries, used = [], 0
        buffer[used : used + size].view(dtype).view(tensor.shape).copy_(tensor.detach())
        entries.append(Entry(name, tuple(tensor.shape), dtype, used, used + size))
        used += size
    if entries:
        yield Bucket(entries, buffer[:used], last=True)


def check_weight(name: str, tensor: torch.Tensor, seen: Collection[str]) -> None:
    """Raise ValueError for a tensor that is not floating-point, or whose name was `seen` in this update."""
    if not tensor.is_floating_point():
        raise ValueError(f"weight {name} is {tensor.dtype}: only floating-point weights are sent")
    if name in seen:
        raise ValueError(f"weight {name} came twice in one update")
