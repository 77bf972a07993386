"""Offloading: parameters and optimizer state are in host memory while their role does not work."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule

P = ParamSpec("P")
R = TypeVar("R")

KEPT = 256 << 20
"""Bytes that the C library may keep for later use."""


class Offload:
    """A context in which the parameters of `root` are on `device`; outside of it they are in host memory.

    Contexts may be nested. Without `enabled`, or where the device is the host, nothing moves.
    """

    def __init__(self, root: nn.Module, device: torch.device, *, enabled: bool) -> None:
        self._root = root
        self._device = device
        self._enabled = enabled and device.type != "cpu"
        self._depth = 0
        if self._enabled:
            self._leave()

    def __enter__(self) -> None:
        if self._enabled and self._depth == 0:
            self._move(self._device)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._leave()

    def _leave(self) -> None:
        if self._enabled:
            if isinstance(self._root, FSDPModule):
                self._root.reshard()  # the outermost module keeps its gathered parameters until its backward pass
            self._move(torch.device("cpu"))
            give_back(self._device)

    def _move(self, device: torch.device) -> None:
        self._root.to(device, non_blocking=True)  # from CUDA into page-locked memory, which copies fast both ways
        wait(device)


def wait(device: torch.device) -> None:
    """Wait for copies from CUDA to `device` when that is the host, whose memory may be read at any time."""
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()


def give_back(device: torch.device) -> None:
    """Give memory back that is kept for later use: torch's on a GPU, where a server may wake, the C library's on a CPU.

    The C library keeps the memory that an update frees. Its pieces rarely fit the next update's, which then takes new
    memory. A small model's is kept: its pages would be asked for again within the next step.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif _free_bytes() > KEPT:
        ctypes.CDLL(None).malloc_trim(0)


_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def _free_bytes() -> int:
    """Bytes that glibc keeps for later use; 0 in other C libraries."""
    if (info := _mallinfo()) is None:
        return 0
    return int(info().fordblks)


@functools.cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    """Find glibc's `mallinfo2` (2.33); None elsewhere."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo
    return found


class HasOffload(Protocol):
    offload: Offload


Worker = TypeVar("Worker", bound=HasOffload)


def on_device(method: Callable[Concatenate[Worker, P], R]) -> Callable[Concatenate[Worker, P], R]:
    """Mark a worker's method that needs its parameters on the device."""

    @functools.wraps(method)
    def run(self: Worker, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.offload:
            return method(self, *args, **kwargs)

    return run


def move_state(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    """Move the optimizer's state to `device`, or, with None, to each parameter's device. Step counts stay."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if value.ndim:
                state[key] = value.to(param.device if device is None else device, non_blocking=True)
    if device is not None:
        wait(device)


def offloading(checkpoint: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that checkpoints a layer: the saved input stays in host memory until the backward pass."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # CUDA copies fast from page-locked memory.
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(*args, **kwargs)

    return run
