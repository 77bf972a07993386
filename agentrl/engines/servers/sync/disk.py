"""Weights through files, in a folder that the servers see under the same path.

A version appears whole or not at all, and only the newest is kept: servers that start anew are sent the weights again.
SGLang reads every `*.safetensors` file of a folder and nothing else of it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.engines.servers.sync.buckets import Bucket, buckets, buffer_bytes
from agentrl.engines.servers.sync.checksum import Expectation, compare
from agentrl.engines.servers.sync.update import Comparison, Server, Update
from agentrl.engines.weights import Weights
from agentrl.system.publish import published_directory


class DiskSender:
    """A WeightSender for servers that share a file system with the trainer."""

    def __init__(
        self, dtype: torch.dtype, bucket_bytes: int, folder: Path, *, timeout: float = 900.0, checksum: bool = False
    ) -> None:
        """`dtype`: the servers' dtype. `bucket_bytes`: a file's size. `folder`: of this sender alone. `timeout`:
        seconds that a server may take to read all. `checksum`: have the servers' weights compared after each send."""
        self.bytes_sent = 0
        self.compared: Comparison = "none"
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._folder = folder.absolute()
        self._timeout = timeout
        self._checksum = checksum

    async def send(self, servers: Sequence[Server], weights: Weights, version: int) -> dict[str, Exception]:
        """See WeightSender. Raises TrainingError on a full disk."""
        update = Update(servers, version, self._timeout)
        expectation = Expectation()
        path = await self._write(weights, version, expectation)
        await update.post(
            "reading files",
            "/update_weights_from_disk",
            lambda _: {
                "model_path": str(path),
                "load_format": "safetensors",
                "weight_version": str(version),
                "flush_cache": False,
                "abort_all_requests": False,
            },
        )
        if self._checksum:
            self.compared = await compare(update, expectation)
        return update.faults

    async def close(self) -> None:
        """Remove the files."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _write(self, weights: Weights, version: int, expectation: Expectation) -> Path:
        """The folder of the new version; older ones are gone."""
        self.bytes_sent = 0
        path = self._folder / f"version-{version}"
        buffer = torch.empty(buffer_bytes(weights.shapes, self._dtype, self._bucket_bytes), dtype=torch.uint8)
        with published_directory(path) as partial:
            filled = buckets(weights.read(), buffer, self._bucket_bytes, self._dtype)
            for number, bucket in enumerate(filled, start=1):
                if self._checksum:
                    expectation.add(bucket)
                await asyncio.to_thread(_save, bucket, partial / f"model-{number:05d}.safetensors")
                self.bytes_sent += bucket.data.numel()
        for other in self._folder.iterdir():
            if other != path:
                shutil.rmtree(other)
        return path


def _save(bucket: Bucket, path: Path) -> None:
    save_file({entry.name: bucket.tensor(entry) for entry in bucket.entries}, path)
