"""Weights sent as files, in a folder that the servers see under the same path.

A version appears whole or not at all. Only the newest is kept: a server that restarts is sent the weights again.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.engines.servers.client import WeightReceiver
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.servers.sync.checksum import compare
from agentrl.engines.servers.sync.filling import BucketSender
from agentrl.engines.servers.sync.update import ExpectedChecksums, SenderSetting, Update
from agentrl.engines.weights import Weights
from agentrl.system.publish import flush_to_disk, published_directory


def build(setting: SenderSetting) -> DiskSender:
    """Send by files in the run's folder."""
    folder = setting.folder / "weights"
    return DiskSender(setting.dtype, setting.bucket_bytes, folder, checksums=setting.checksums)


class DiskSender(BucketSender):
    """A WeightSender for servers that share a file system with the trainer."""

    def __init__(
        self,
        dtype: torch.dtype,
        bucket_bytes: int,
        folder: Path,
        *,
        timeout: float = 900.0,
        checksums: Callable[[], ExpectedChecksums] | None = None,
    ) -> None:
        """`folder`: of this sender alone, with a file a bucket. `timeout`: to read all. The rest is as for
        `BucketSender`."""
        super().__init__(dtype, bucket_bytes, timeout, checksums)
        self._folder = folder.absolute()

    async def send(self, servers: Sequence[WeightReceiver], weights: Weights, version: int) -> dict[str, Exception]:
        """See WeightSender. Raises TrainingError on a full disk."""
        update = Update(servers, version, self._timeout)
        path, expected = await self._write(weights, version)
        await update.each("reading files", lambda server: server.update_from_disk(path, version, self._timeout))
        if expected is not None:
            self.compared = await compare(update, expected)
        return update.faults

    async def close(self) -> None:
        """Remove the files."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _write(self, weights: Weights, version: int) -> tuple[Path, ExpectedChecksums | None]:
        """Write the weights to the folder of the new version, and remove older ones; see `each_bucket`."""
        self.bytes_sent = 0
        path = self._folder / f"version-{version}"
        buffer = torch.empty(self.buffer_bytes(weights), dtype=torch.uint8)
        with published_directory(path) as partial:
            self.bytes_sent, expected = await self.each_bucket(
                weights,
                buffer,
                lambda number, bucket: asyncio.to_thread(_save, bucket, partial / f"model-{number:05d}.safetensors"),
            )
        await asyncio.to_thread(remove_others, path)
        return path, expected


def _save(bucket: Bucket, path: Path) -> None:
    save_file({entry.name: bucket.tensor(entry) for entry in bucket.entries}, path)
    flush_to_disk(path)  # here, as `published_directory` would have the event loop wait for the disk


def remove_others(path: Path) -> None:
    """Remove all folders next to `path`."""
    for other in path.parent.iterdir():
        if other != path:
            shutil.rmtree(other)
