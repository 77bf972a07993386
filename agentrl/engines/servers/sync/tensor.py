"""Weights handed to servers on the same host in a buffer that they map, so that only its handle is sent.

On a CPU the buffer is shared memory, on a GPU device memory opened by CUDA IPC. Each server copies out of it into its
own parameters before it answers; then the buffer is filled with the next bucket.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.multiprocessing

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import WeightReceiver
from agentrl.engines.servers.sync.checksum import compare
from agentrl.engines.servers.sync.filling import BucketSender
from agentrl.engines.servers.sync.update import ExpectedChecksums, SenderSetting, Update
from agentrl.engines.weights import Weights
from agentrl.errors import ConfigError


def build(setting: SenderSetting) -> TensorSender:
    """Hand over memory. Raises ConfigError where a server runs on another machine."""
    if not setting.local:
        raise ConfigError(
            "actor_rollout_ref.rollout.update_weights_transport=tensor hands over memory, and "
            f"{', '.join(setting.urls)} are not all on this machine; use distributed or disk"
        )
    return TensorSender(setting.dtype, setting.bucket_bytes, setting.device, checksums=setting.checksums)


class TensorSender(BucketSender):
    """A WeightSender for servers on this host."""

    def __init__(
        self,
        dtype: torch.dtype,
        bucket_bytes: int,
        device: torch.device | str = "cpu",
        *,
        timeout: float = 300.0,
        checksums: Callable[[], ExpectedChecksums] | None = None,
    ) -> None:
        """`device`: where the buffer lies, the same kind as the servers'. `timeout`: for one bucket. The rest is as
        for `BucketSender`."""
        super().__init__(dtype, bucket_bytes, timeout, checksums)
        self._device = torch.device(device)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    async def send(self, servers: Sequence[WeightReceiver], weights: Weights, version: int) -> dict[str, Exception]:
        """See WeightSender. Raises EngineError when shared memory is too small for the buffer."""
        self.bytes_sent = 0
        size = self.buffer_bytes(weights)
        if self._buffer.numel() < size:
            await self.close()  # the old one first, as both need not have room
            on_host = self._device.type == "cpu"
            self._buffer = _shared(size) if on_host else torch.empty(size, dtype=torch.uint8, device=self._device)
        buffer = self._buffer
        update = Update(servers, version, self._timeout)
        infos = await update.infos()
        await update.begin()
        self.bytes_sent, expected = await self.each_bucket(
            weights,
            buffer,
            lambda number, bucket: update.each(
                f"bucket {number}",
                lambda server: server.update_from_memory(
                    bucket, version, ranks=infos[server.url].tensor_parallel, timeout=self._timeout
                ),
            ),
        )
        await update.end()
        if expected is not None:
            self.compared = await compare(update, expected)
        return update.faults

    async def close(self) -> None:
        """Free the buffer. Its shared memory is gone when the servers, too, have let go of it."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Have torch name shared memory by files inside the block.

    An unrelated process can open a file. By default torch passes a descriptor, which only a child can be given.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@contextmanager
def _stderr_not_inherited() -> Iterator[None]:
    """Keep processes that are started inside the block from inheriting stderr.

    The first shared buffer starts torch's torch_shm_manager. When this process is killed, the manager stays until the
    servers that mapped the buffer are gone, and then removes it. A reader of our stderr must not wait for that.
    """
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
    with shared_by_name(), _stderr_not_inherited():
        return torch.empty(size, dtype=torch.uint8).share_memory_()
