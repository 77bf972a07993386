"""Weights broadcast to servers on any host by a torch.distributed group: rank 0 is the trainer, then come the servers.

The group is separate from all others of the trainer, its default group included. It lasts from one send to the next
while the servers stay the same. When a server fails in mid-broadcast the others break off, too; then the group is
rebuilt without it and everything is sent again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Literal, Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from agentrl.engines.contract import RequestError
from agentrl.engines.servers.client import GroupInvitation, ServerInfo, WeightReceiver
from agentrl.engines.servers.sync.checksum import compare
from agentrl.engines.servers.sync.filling import BucketSender
from agentrl.engines.servers.sync.update import ExpectedChecksums, SenderSetting, Update
from agentrl.engines.weights import Weights
from agentrl.parallel.store import listening_store

GRACE = 10.0
"""Seconds for servers to answer after the group was broken off."""


def build(setting: SenderSetting) -> DistributedSender:
    """Broadcast by nccl between GPUs, else by gloo."""
    backend: Literal["gloo", "nccl"] = "nccl" if setting.device == "cuda" else "gloo"
    return DistributedSender(setting.dtype, setting.bucket_bytes, backend, checksums=setting.checksums)


class DistributedSender(BucketSender):
    """A WeightSender for servers on any host that the trainer can reach, and that can reach the trainer."""

    def __init__(
        self,
        dtype: torch.dtype,
        bucket_bytes: int,
        backend: Literal["gloo", "nccl"],
        *,
        timeout: float = 300.0,
        checksums: Callable[[], ExpectedChecksums] | None = None,
    ) -> None:
        """A bucket is held once here and once by each rank of a server. `timeout`: for one bucket, and for making the
        group. The rest is as for `BucketSender`."""
        super().__init__(dtype, bucket_bytes, timeout, checksums)
        self._backend: Literal["gloo", "nccl"] = backend
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._group: _Group | None = None
        self._version = ""

    async def send(self, servers: Sequence[WeightReceiver], weights: Weights, version: int) -> dict[str, Exception]:
        """See WeightSender. Reads `weights` once more for each time that a server fails under way."""
        update = Update(servers, version, self._timeout)
        infos = await update.infos()
        await update.begin()
        while update.servers:
            taking_part = list(update.servers)
            try:
                await self._join(update, infos)
                expected = await self._broadcast(update, weights)
            except _Broken as broken:
                await self._drop_group(update.servers)
                if len(update.servers) == len(taking_part):
                    update.fail_all(taking_part, broken.step, broken)
                continue
            await update.end()
            self._version = str(version)
            if expected is not None:
                self.compared = await compare(update, expected)
            break
        return update.faults

    async def close(self) -> None:
        """Destroy the group here and on the servers that answer."""
        if self._group is not None:
            await self._drop_group(self._group.servers)

    async def _join(self, update: Update, infos: Mapping[str, ServerInfo]) -> None:
        """Make a group of exactly the servers of the update, unless it exists. Raises _Broken.

        A server with another version than it was last sent has restarted since, and is in no group.
        """
        sizes = [(server.url, infos[server.url].tensor_parallel) for server in update.servers]
        same = all(infos[server.url].weight_version == self._version for server in update.servers)
        if self._group is not None and self._group.sizes == sizes and same:
            return
        await self.close()
        group = self._group = _Group(update.servers, sizes, self._backend, self._timeout)
        await self._together(
            update,
            "joining the group",
            lambda server: server.join_weight_group(group.invitation(server), self._timeout),
            group.join,
        )

    async def _broadcast(self, update: Update, weights: Weights) -> ExpectedChecksums | None:
        assert self._group is not None
        group = self._group
        self.bytes_sent = 0
        buffer = torch.empty(self.buffer_bytes(weights), dtype=torch.uint8, device=self._device)
        self.bytes_sent, expected = await self.each_bucket(
            weights,
            buffer,
            lambda number, bucket: self._together(
                update,
                f"bucket {number}",
                lambda server: server.update_from_broadcast(
                    bucket, update.version, group=group.name, timeout=self._timeout
                ),
                lambda: group.broadcast(bucket.data),
            ),
        )
        return expected

    async def _together(
        self, update: Update, step: str, ask: Callable[[WeightReceiver], Awaitable[None]], ours: Callable[[], None]
    ) -> None:
        """Run `ask` for each server while `ours` runs in a thread. The first failure ends the other sides.

        Raises _Broken when anything failed, and drops the servers to blame from the update: all that gave no answer;
        if all answered, all that refused before we broke off. A server that only reports the broken group stays.
        """
        assert self._group is not None
        servers = list(update.servers)
        theirs = [asyncio.ensure_future(ask(server)) for server in servers]
        mine = asyncio.create_task(asyncio.to_thread(ours))
        try:
            done, _ = await asyncio.wait([mine, *theirs], return_when=asyncio.FIRST_EXCEPTION, timeout=self._timeout)
            first = next((error for task in done if (error := task.exception()) is not None), None)
            if first is None and len(done) == 1 + len(theirs):
                return
            # A refusal counts only while our side works: after our own failure the servers' errors are its echo.
            refused = [] if mine in done and mine.exception() else _errors(servers, theirs)
            await asyncio.to_thread(self._group.abort)
            await asyncio.wait([mine, *theirs], timeout=GRACE)
        except asyncio.CancelledError:
            # How far the others are is unknown, so the group cannot be used again.
            self._group.abort()
            self._group = None
            raise
        finally:
            for task in theirs:
                task.cancel()
            await asyncio.gather(*theirs, return_exceptions=True)
        unanswered = [pair for pair in _errors(servers, theirs) if not isinstance(pair[1], RequestError)]
        for server, error in unanswered or refused:
            update.fail(server, step, error)
        raise _Broken(step, first or TimeoutError(f"not done within {self._timeout:g} s"))

    async def _drop_group(self, servers: Sequence[WeightReceiver]) -> None:
        """Destroy the group here and on `servers`; servers that are gone, or never joined, are ignored."""
        group, self._group = self._group, None
        if group is None:
            return
        await asyncio.gather(
            *(server.leave_weight_group(group.name, GRACE) for server in servers),
            asyncio.to_thread(group.abort),
            return_exceptions=True,
        )


class _Broken(Exception):
    """Raised when the group can no longer be used."""

    def __init__(self, step: str, cause: BaseException) -> None:
        super().__init__(str(cause) or repr(cause))
        self.step = step


class Peers(Protocol):
    """Methods of ProcessGroupGloo and ProcessGroupNCCL that torch does not declare."""

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions, /) -> dist.Work:
        """Send `tensors`, a single one [B] uint8, from the rank that `options` name to the others, in place."""
        ...

    def abort(self) -> None: ...


class _Group:
    """The trainer's side of the group: rank 0.

    Servers make their side with torch's own helper for process groups, whose store prefixes are repeated in `join`.
    """

    def __init__(
        self,
        servers: Sequence[WeightReceiver],
        sizes: list[tuple[str, int]],
        backend: Literal["gloo", "nccl"],
        timeout: float,
    ) -> None:
        """`sizes`: each server's URL and its number of ranks."""
        self.servers = list(servers)
        self.sizes = sizes
        self.name = f"agentrl-{uuid.uuid4().hex}"
        self._backend = backend
        self._timeout = timedelta(seconds=timeout)
        self._world = 1 + sum(size for _, size in self.sizes)
        first = itertools.accumulate([size for _, size in sizes], initial=1)  # the trainer is rank 0
        self._offsets = {url: rank for (url, _), rank in zip(sizes, first, strict=False)}
        self._addresses = {server.url: address_towards(server.url) for server in servers}
        with listener(self._addresses.values()) as listening:
            self._address, self._port = listening.getsockname()[:2]
            self._store: TCPStore | None = listening_store(listening, self._world, self._timeout)
        self._peers: Peers | None = None

    def invitation(self, server: WeightReceiver) -> GroupInvitation:
        """Make the invitation of one server."""
        is_any = ipaddress.ip_address(self._address).is_unspecified
        return GroupInvitation(
            name=self.name,
            backend=self._backend,
            address=self._addresses[server.url] if is_any else self._address,
            port=self._port,
            first_rank=self._offsets[server.url],
            world_size=self._world,
        )

    def join(self) -> None:
        """Join as rank 0. Blocks until all ranks have met."""
        assert self._store is not None
        device = "cuda" if self._backend == "nccl" else "cpu"
        named = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
        store = PrefixStore(f"{device}/", named)
        if self._backend == "gloo":
            # Servers may see this host under several addresses: the first that is not on loopback counts.
            seen = min(self._addresses.values(), key=lambda one: (ipaddress.ip_address(one).is_loopback, one))
            self._peers = cast(Peers, _gloo_at(seen, store, self._world, self._timeout))
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        self._peers = cast(Peers, dist.ProcessGroupNCCL(store, 0, self._world, options))

    def broadcast(self, data: torch.Tensor) -> None:
        """Broadcast `data` [bytes] uint8 and block until it is sent. Raises RuntimeError on failure or timeout."""
        if self._peers is None:
            raise RuntimeError("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._peers.broadcast([data], options).wait(self._timeout)
        if data.is_cuda:
            torch.cuda.synchronize(data.device)

    def abort(self) -> None:
        """Close all connections: peers that wait for us break off at once."""
        peers, self._peers, self._store = self._peers, None, None
        if peers is not None:
            peers.abort()


def _gloo_at(host: str, store: PrefixStore, ranks: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Join as rank 0, and announce this machine to the others as `host`, unless a user names an interface.

    By itself gloo announces the address of the machine's own name, which may be loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return dist.ProcessGroupGloo(store, 0, ranks, timeout=timeout)
    options = vars(dist.ProcessGroupGloo)["_Options"]()  # torch does not declare it
    options._timeout, options._devices = timeout, [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, 0, ranks, options)


def _errors(
    servers: Sequence[WeightReceiver], tasks: Sequence[asyncio.Future[None]]
) -> list[tuple[WeightReceiver, Exception]]:
    """List the servers whose request has ended in an error or was given up, with the error."""
    errors: list[tuple[WeightReceiver, Exception]] = []
    for server, task in zip(servers, tasks, strict=True):
        error = TimeoutError("no answer") if task.cancelled() else task.exception() if task.done() else None
        if isinstance(error, Exception):
            errors.append((server, error))
    return errors


def address_towards(url: str) -> str:
    """Find this host's address as the server at `url` sees it. Raises OSError when there is no route to it."""
    parts = urlsplit(url)
    family, kind, protocol, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def listener(addresses: Iterable[str]) -> socket.socket:
    """Listen where servers are that see this host under `addresses`, and nowhere else. Raises OSError.

    Servers of this machine reach its other addresses, too, so one address is enough unless servers on other machines
    see two of them; only then all are listened at.
    """
    seen = sorted(set(addresses))
    outer = [address for address in seen if not ipaddress.ip_address(address).is_loopback]
    ipv6 = any(":" in address for address in outer or seen[:1])
    if len(outer) > 1:
        chosen = "::" if ipv6 else "0.0.0.0"
    else:
        chosen = (outer or seen)[0]
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    return socket.create_server((chosen, 0), family=family, backlog=1024, dualstack_ipv6=chosen == "::")
