"""Weights handed to servers on the same host: they lie in a buffer that the servers map, only its handle travels.

On a CPU the buffer is shared memory, on a GPU device memory opened by CUDA IPC. Each server copies out of it into its
own parameters before it answers; then the buffer is filled with the next bucket.
"""

from __future__ import annotations

import base64
import fcntl
import io
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.sync.buckets import Bucket, buckets, buffer_bytes
from agentrl.engines.servers.sync.checksum import Expectation, compare
from agentrl.engines.servers.sync.update import Comparison, Server, Update
from agentrl.engines.weights import Weights

_DEVICE = 6
"""Which argument of torch's rebuild_cuda_tensor is the device."""


class TensorSender:
    """A WeightSender for servers on this host."""

    def __init__(
        self,
        dtype: torch.dtype,
        bucket_bytes: int,
        device: torch.device | str = "cpu",
        *,
        timeout: float = 300.0,
        checksum: bool = False,
    ) -> None:
        """`dtype`: the servers' dtype. `bucket_bytes`: the buffer's size. `device`: where the buffer lies, the same
        kind as the servers'. `timeout`: seconds that a server may take for one bucket. `checksum`: have the servers'
        weights compared after each send."""
        self.bytes_sent = 0
        self.compared: Comparison = "none"
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._device = torch.device(device)
        self._timeout = timeout
        self._checksum = checksum
        self._buffer = torch.empty(0, dtype=torch.uint8)

    async def send(self, servers: Sequence[Server], weights: Weights, version: int) -> dict[str, Exception]:
        """See WeightSender. Raises EngineError when shared memory is too small for the buffer."""
        self.bytes_sent = 0
        buffer = self._buffer_of(buffer_bytes(weights.shapes, self._dtype, self._bucket_bytes))
        update = Update(servers, version, self._timeout)
        infos = await update.infos()
        await update.begin()
        expectation = Expectation()
        filled = buckets(weights.read(), buffer, self._bucket_bytes, self._dtype)
        for number, bucket in enumerate(filled, start=1):
            if self._checksum:
                expectation.add(bucket)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            await update.post(
                f"bucket {number}",
                "/update_weights_from_tensor",
                lambda server, bucket=bucket: {  # type: ignore[misc]
                    "serialized_named_tensors": [serialize(bucket) for _ in range(infos[server.url].tensor_parallel)],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                    "weight_version": str(version) if bucket.last else None,
                },
            )
            self.bytes_sent += bucket.data.numel()
        await update.end()
        if self._checksum:
            self.compared = await compare(update, expectation)
        return update.faults

    async def close(self) -> None:
        """Free the buffer. Its shared memory is gone when the servers, too, have let go of it."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _buffer_of(self, size: int) -> torch.Tensor:
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = _shared(size) if self._device.type == "cpu" else _on_device(size, self._device)
        return self._buffer


def serialize(bucket: Bucket) -> str:
    """What one rank of a server gets: base64 of a pickle with a handle of the buffer and the tensors' places in it.

    A handle of CUDA memory counts its users and is good for one rank only.
    """
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=entry.dtype,
            start_idx=entry.start,
            end_idx=entry.end,
            numel=entry.end - entry.start,
        )
        for entry in bucket.entries
    ]
    data: Any = bucket.data if bucket.data.device.type == "cpu" else _CudaHandle(bucket.data)
    payload = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(payload).dump({"flattened_tensor": data, "metadata": metadata})
    return base64.b64encode(payload.getvalue()).decode()


class _CudaHandle:
    """Pickles as a CUDA tensor whose device is told by its UUID, as SGLang reads it: indices differ by process."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Shared memory is named by a file, which an unrelated process can open; by torch's default it is a descriptor,
    which only a child can be given."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@contextmanager
def _stderr_not_inherited() -> Iterator[None]:
    """The first shared buffer starts torch's torch_shm_manager. When this process is killed it removes the buffer as
    soon as the servers that mapped it are gone, too; until then a reader of our stderr must not wait for it."""
    flags = fcntl.fcntl(2, fcntl.F_GETFD)
    fcntl.fcntl(2, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
    try:
        yield
    finally:
        fcntl.fcntl(2, fcntl.F_SETFD, flags)


def _shared(size: int) -> torch.Tensor:
    free = shutil.disk_usage("/dev/shm").free
    if size > free:
        raise EngineError(
            f"a weight bucket needs {size} bytes of shared memory, /dev/shm has {free} free: make it larger "
            "(docker: --shm-size) or actor_rollout_ref.rollout.update_weights_bucket_megabytes smaller"
        )
    with _shared_by_name(), _stderr_not_inherited():
        return torch.empty(size, dtype=torch.uint8).share_memory_()


def _on_device(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
