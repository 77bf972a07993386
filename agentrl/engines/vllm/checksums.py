"""Checksums of the weights that a vLLM server was sent, as its receiver computes them from what it keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from agentrl.engines.servers.sync.buckets import Bucket


class Arrived:
    """Implements `ExpectedChecksums` for weights under the names that they are sent by, in the host's memory."""

    def __init__(self) -> None:
        self._checksums: dict[str, str] = {}

    def add(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            content = bucket.data[entry.start : entry.end].cpu().numpy().tobytes()
            self._checksums[entry.name] = hashlib.sha256(content).hexdigest()

    def for_parameters(self, parameters: Collection[str]) -> Mapping[str, str] | None:
        return self._checksums if self._checksums.keys() == set(parameters) else None
