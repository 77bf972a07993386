"""One weight update of several servers: a failed server is dropped from it and its fault kept; the others continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import ServerInfo, WeightReceiver
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.weights import Weights

if TYPE_CHECKING:
    import torch

Comparison = Literal["sent", "servers", "none"]
"""Counterpart of the servers' checksums: the weights sent, one another, or nothing (one server only)."""


class ExpectedChecksums(Protocol):
    """Checksums that a server must answer, taken while buckets are sent. Each server software has its own class."""

    def add(self, bucket: Bucket) -> None:
        """Take note of a bucket before it is sent."""
        ...

    def for_parameters(self, parameters: Collection[str]) -> Mapping[str, str] | None:
        """Return the checksums of a server's parameters by name; None where their layout is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class SenderSetting:
    """Arguments of a weight transport: a function from this to a `WeightSender`, which the config names."""

    dtype: torch.dtype
    """Type of the servers' weights."""
    bucket_bytes: int
    """Most bytes that are sent at once, by `update_weights_bucket_megabytes`."""
    device: str
    """Kind of the servers' device: cpu or cuda."""
    urls: Sequence[str]
    """Addresses of the servers."""
    local: bool
    """True: all servers run on this machine."""
    folder: Path
    """The run's own, for files."""
    checksums: Callable[[], ExpectedChecksums] | None
    """Makes the expected checksums of a send; None: what arrives is not verified."""


class WeightSender(Protocol):
    """Sends the weights of a policy to servers."""

    dtype: torch.dtype
    """Type that weights are sent in."""
    bytes_sent: int
    """Bytes of weights of the last `send`, counted once however many servers there are."""
    compared: Comparison
    """How the last `send` was verified."""

    async def send(self, servers: Sequence[WeightReceiver], weights: Weights, version: int) -> dict[str, Exception]:
        """Send all weights and `version` to all of `servers` at once. Return the faults by server URL.

        A server with a fault may hold some new and some old weights and must not serve; the next `send` repairs it.

        Names and shapes were checked before, and the servers paused or drained by the caller, who also flushes caches.
        Raises ValueError when `weights.read` does not give what `weights.shapes` says.
        """
        ...

    async def close(self) -> None:
        """Free the memory, files or group of this side and of the servers."""
        ...


class WeightUpdateFailed(EngineError):
    """A server did not take the weights; the message has the server, the step and the server's own words."""


class Update:
    """Tracks which servers still take part, and why the others do not."""

    def __init__(self, servers: Sequence[WeightReceiver], version: int, timeout: float) -> None:
        """`timeout`: seconds that one step may take on one server."""
        self.servers = list(servers)
        self.version = version
        self.timeout = timeout
        self.faults: dict[str, Exception] = {}

    async def begin(self) -> None:
        """Open the update on each server."""
        await self.each("begin", lambda server: server.begin_weight_update(self.timeout))

    async def end(self) -> None:
        """Close the update on each server: its weights are whole from here on."""
        await self.each("end", lambda server: server.end_weight_update(self.timeout))

    async def infos(self) -> dict[str, ServerInfo]:
        """Ask each server for its ranks and weight version; the answers by URL."""
        infos: dict[str, ServerInfo] = {}

        async def ask(server: WeightReceiver) -> None:
            infos[server.url] = await server.info()

        await self.each("asking for its ranks", ask)
        return infos

    def fail(self, server: WeightReceiver, step: str, error: Exception) -> None:
        """Drop a server from the update. Only its first fault is kept."""
        self.servers = [other for other in self.servers if other.url != server.url]
        message = str(error) or repr(error)
        at = "" if server.url in message else f"{server.url}: "
        fault = WeightUpdateFailed(f"weights of version {self.version}, {step}: {at}{message}")
        fault.__cause__ = error
        self.faults.setdefault(server.url, fault)

    def drop(self, faults: Mapping[str, Exception]) -> None:
        """Drop the servers with these faults, by URL, of another sender."""
        self.servers = [server for server in self.servers if server.url not in faults]
        self.faults |= faults

    def fail_all(self, servers: Iterable[WeightReceiver], step: str, error: Exception) -> None:
        """Drop several servers for the same error."""
        for server in list(servers):
            self.fail(server, step, error)

    async def each(
        self,
        step: str,
        act: Callable[[WeightReceiver], Awaitable[object]],
        servers: Sequence[WeightReceiver] | None = None,
    ) -> None:
        """Run `act` on all servers still in the update, or `servers` of it, at once; a server whose `act` raises is
        dropped."""
        servers = list(self.servers) if servers is None else servers
        outcomes = await asyncio.gather(*(act(server) for server in servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.fail(server, step, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
