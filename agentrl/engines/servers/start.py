"""Steps of an engine's start that all server software shares."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import torch

from agentrl.config.registries import WEIGHT_TRANSPORTS
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import ServerClient, ServerFailed, ServerInfo
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.servers.sync.delta import DeltaSender
from agentrl.engines.servers.sync.update import ExpectedChecksums, SenderSetting, WeightSender
from agentrl.system.quota import run_concurrently
from agentrl.system.user_code import user_code

ROLLOUT = "actor_rollout_ref.rollout"
LOOK_EVERY = 0.5
"""Seconds between two tries to reach a server that is attached to."""
Say = Callable[[str], None]
"""Shows the user a line."""


async def start_all(processes: Sequence[ServerProcess], timeout: float, progress: Say) -> None:
    """Start all at once and wait for them; the first failure ends the wait. The caller stops them."""
    for process in processes:
        process.start()

    async def ready(number: int, process: ServerProcess) -> None:
        await process.ready(timeout, lambda text: progress(f"server {number}: {text}"))

    await run_concurrently(itertools.starmap(ready, enumerate(processes)))


async def reach(client: ServerClient, timeout: float, progress: Say = lambda _: None) -> ServerInfo:
    """Wait until a server that is attached to answers. Raises EngineError after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    told = False
    while True:
        try:
            # A trainer that was killed may have left it paused; then it would not answer a check.
            await client.resume()
            await client.check(min(timeout, 30.0))
            return await client.info()
        except ServerFailed as error:
            if loop.time() >= end:
                raise EngineError(f"{ROLLOUT}.server_urls: no answer within {timeout:g} s: {error}") from error
            if not told:
                progress(f"no answer yet, waiting up to {timeout:g} s: {error}")
                told = True
        await asyncio.sleep(LOOK_EVERY)


def weight_sender(
    config: RolloutsConfig,
    device: str,
    urls: Sequence[str],
    folder: Path,
    checksums: Callable[[], ExpectedChecksums],
    notify: Say = lambda _: None,
) -> WeightSender:
    """Build the sender that update_weights_transport and update_weights_delta ask for. Raises ConfigError.

    `checksums` makes the expected checksums of the server software; used with update_weights_checksum. `notify` shows
    why a server is sent all weights.
    """
    rollout = config.actor_rollout_ref.rollout
    # A server on a CPU computes in float32.
    dtype = torch.float32 if device == "cpu" else getattr(torch, config.actor_rollout_ref.model.dtype)
    setting = SenderSetting(
        dtype=dtype,
        bucket_bytes=rollout.update_weights_bucket_megabytes << 20,
        device=device,
        urls=urls,
        local=all(map(is_this_machine, urls)),
        folder=folder,
        checksums=checksums if rollout.update_weights_checksum and not rollout.update_weights_delta else None,
    )
    transport = rollout.update_weights_transport
    build = cast(Callable[[SenderSetting], WeightSender], WEIGHT_TRANSPORTS.get(transport))
    with user_code(f"weight transport {transport}", build):
        sender = build(setting)
    if not rollout.update_weights_delta:
        return sender
    return DeltaSender(sender, checksums if rollout.update_weights_checksum else None, notify)


def is_this_machine(url: str) -> bool:
    """True when the URL's host is a name or an address of this machine."""
    addresses, own = addresses_of(urlsplit(url).hostname or ""), addresses_of(socket.gethostname())
    return bool(addresses) and all(ipaddress.ip_address(it).is_loopback or it in own for it in addresses)


def addresses_of(host: str) -> set[str]:
    """Resolve a host name. Empty where it is unknown, as a container's own name may be."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
