"""An engine over servers from the config: starts servers or attaches to them, and chooses how they are sent weights."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast
from urllib.parse import urlsplit

import aiohttp
import torch

from agentrl.config.registries import WEIGHT_TRANSPORTS
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.training import Config
from agentrl.engines.builder import EngineSetting
from agentrl.engines.contract import EngineError, RequestError
from agentrl.engines.servers.adapters import check_held, find_frozen_adapters
from agentrl.engines.servers.client import ServerClient, ServerFailed, ServerInfo, WrongServer
from agentrl.engines.servers.command_line import ServerArguments
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.adapters import AdapterSender
from agentrl.engines.servers.sync.delta import DeltaSender
from agentrl.engines.servers.sync.update import ExpectedChecksums, SenderSetting, WeightSender
from agentrl.errors import ConfigError, TrainingError
from agentrl.remote.credentials import check_set, from_environment
from agentrl.system.http import allow_many_files, http_client
from agentrl.system.loop_thread import LoopThread
from agentrl.system.quota import run_concurrently
from agentrl.system.user_code import user_code

ROLLOUT = "actor_rollout_ref.rollout"
LOOK_EVERY = 0.5
"""Seconds between two tries to reach a server that is attached to."""
WRONG_KEY, NO_SUCH_PATH = (401, 403), (404, 405)
"""HTTP statuses of a server that was started otherwise than agentrl needs it."""
Answer = TypeVar("Answer")
Say = Callable[[str], None]
"""Shows the user a line."""


@dataclass(frozen=True, slots=True)
class Software:
    """A server software: the parts of its engine."""

    name: str
    """Its name in messages."""
    own_arguments: str
    """Config key of the user's own arguments for its servers."""
    arguments: Callable[[RolloutsConfig, str, int, int], ServerArguments]
    """Makes a server's arguments from the config, the device, the longest context in tokens, and its number."""
    kind: type[ServerArguments]
    """Class of these."""
    process: type[ServerProcess]
    client: Callable[[str, aiohttp.ClientSession, str | None], ServerClient]
    """Makes the client of one server; arguments: URL, connections, key."""
    needs: str
    """How a server must be started by hand, for messages."""
    check_attached: Callable[[ServerInfo, str, int], None]
    """Checks a server that somebody else started for a job's longest context. Raises ConfigError."""
    engine: type[ServerEngine]
    checksums: Callable[[], ExpectedChecksums]
    """Makes the expected checksums of a send."""
    check: Callable[[ServerInfo, str, RolloutsConfig], None] | None = None
    """Checks each server, by URL, for the config. Raises ConfigError."""


def build_engine(software: Software, setting: EngineSetting, loop: LoopThread) -> ServerEngine:
    """Start servers, or attach to them. See `EngineBuilder`."""
    config, reporter = setting.config, setting.reporter
    rollout = config.actor_rollout_ref.rollout
    if rollout.free_cache_engine and setting.device == "cpu":
        raise ConfigError(f"{ROLLOUT}.free_cache_engine=true frees memory of a GPU, and this machine has none")
    verb = "start" if rollout.server_urls is None else "reach"
    with reporter.stage(f"{verb} {software.name} servers"):
        starting = start_engine(
            software,
            config,
            setting.device,
            setting.max_model_len,
            setting.folder,
            notify=reporter.warn,
            progress=reporter.note,
        )
        try:
            return loop.run(starting)
        except EngineError as error:
            raise TrainingError(str(error)) from error


async def start_engine(
    software: Software,
    config: RolloutsConfig,
    device: str,
    max_model_len: int,
    folder: Path,
    *,
    notify: Say,
    progress: Say,
) -> ServerEngine:
    """Start `num_servers` servers, or attach to `server_urls`, and wait until all of them answer.

    Started servers write their logs to `folder`/servers/. Servers that are attached to have some weights of the model.
    They must be sent the policy's before they generate. `progress` shows the stages of the start, `notify` what happens
    to servers later on. Raises ConfigError or EngineError with the server's own last error; no process is left then.
    """
    allow_many_files()
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    facts = ModelFacts.from_path(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    if facts.max_positions is not None and max_model_len > facts.max_positions:
        raise ConfigError(
            f"{model.path} was made for contexts of {facts.max_positions} tokens, and this job needs {max_model_len} "
            f"({ROLLOUT}.max_model_len, or data.max_prompt_length + data.max_response_length)"
        )
    frozen = find_frozen_adapters(config, facts, notify)
    http = http_client()
    processes: Sequence[ServerProcess] = []
    try:
        if rollout.server_urls is None:
            check_machine(config, device)
            processes = server_processes(software, config, device, max_model_len, folder)
            try:
                await start_all(processes, rollout.server_start_timeout, progress)
            except EngineError as error:
                raise EngineError(f"{error}\n{started_with(config, software.own_arguments)}") from error
            servers = [Server(software.client(process.url, http, process.key), process) for process in processes]
            infos = [await server.client.info() for server in servers]
        else:
            variable = rollout.server_api_key_env
            key = None if variable is None else from_environment(variable)
            servers = [Server(software.client(url, http, key)) for url in rollout.server_urls]
            infos = await asyncio.gather(
                *[reach(server.client, software.needs, rollout.server_start_timeout, progress) for server in servers]
            )
            for server, info in zip(servers, infos, strict=True):
                check_model(info, server.url, facts)
                software.check_attached(info, server.url, max_model_len)
            if frozen:
                await run_concurrently(check_held(server.client, frozen) for server in servers)
        if software.check is not None:
            for server, info in zip(servers, infos, strict=True):
                software.check(info, server.url, config)
        timings = Timings(
            check_interval=rollout.health_check_interval,
            start_timeout=rollout.server_start_timeout,
            restarts=rollout.max_server_restarts,
        )
        return software.engine(
            servers,
            http,
            facts,
            weight_sender(
                config, device, [server.url for server in servers], folder, software.checksums, notify, frozen
            ),
            max_model_len=max_model_len,
            deterministic=all(info.deterministic for info in infos),
            free_weights=config.frees_weights,
            notify=notify,
            timings=timings,
            keep_kv_cache=keeps(config),
        )
    except BaseException:
        for process in processes:
            process.stop()
        await http.close()
        raise


def server_processes(
    software: Software, config: RolloutsConfig, device: str, max_model_len: int, folder: Path
) -> list[ServerProcess]:
    """Prepare the servers that a config starts; each has a random key."""
    rollout = config.actor_rollout_ref.rollout
    return [
        software.process(
            software.arguments(config, device, max_model_len, number),
            None,
            folder / "servers" / f"{number}.log",
            key=secrets.token_urlsafe(32),
            pass_env=rollout.server_pass_env,
        )
        for number in range(rollout.num_servers)
    ]


def check_machine(config: RolloutsConfig, device: str) -> None:
    """Check that this machine has what servers need: GPUs, and the variables that they may see. Raises ConfigError."""
    rollout = config.actor_rollout_ref.rollout
    ranks = rollout.tensor_model_parallel_size
    check_set(f"{ROLLOUT}.server_pass_env", rollout.server_pass_env)
    if device == "cuda" and rollout.num_servers * ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{ROLLOUT}.num_servers={rollout.num_servers} with {ROLLOUT}.tensor_model_parallel_size={ranks} needs "
            f"{rollout.num_servers * ranks} GPUs; this machine has {torch.cuda.device_count()}"
        )
    if device == "cpu" and ranks > 1:
        raise ConfigError(f"{ROLLOUT}.tensor_model_parallel_size={ranks} needs as many GPUs; on a CPU it must be 1")


def keeps(config: RolloutsConfig) -> bool:
    """Say whether requests that run while weights are sent keep their keys and values."""
    return isinstance(config, Config) and config.async_training.keep_kv_cache


def started_with(config: RolloutsConfig, own_arguments: str) -> str:
    """List the keys that a failed start may come from, with their values."""
    rollout = config.actor_rollout_ref.rollout
    own = vars(rollout.engine_kwargs)[own_arguments.rpartition(".")[2]]
    keys = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        f"{ROLLOUT}.server_start_timeout": f"{rollout.server_start_timeout:g}",
        **{f"{own_arguments}.{name}": value for name, value in own.items()},
    }
    return "It was started with " + ", ".join(f"{key}={value}" for key, value in keys.items())


def check_model(info: ServerInfo, url: str, facts: ModelFacts) -> None:
    """Check that a server that somebody else started has the policy's model. Raises ConfigError."""
    if None not in (info.architecture, facts.architecture) and info.architecture != facts.architecture:
        raise ConfigError(
            f"{ROLLOUT}.server_urls: {url} serves a {info.architecture} ({info.model_path}), and the policy "
            f"is a {facts.architecture}: start it with the policy's model"
        )


async def start_all(processes: Sequence[ServerProcess], timeout: float, progress: Say) -> None:
    """Start all at once and wait for them; the first failure ends the wait. The caller stops them."""
    for process in processes:
        process.start()

    async def ready(number: int, process: ServerProcess) -> None:
        await process.ready(timeout, lambda text: progress(f"server {number}: {text}"))

    await run_concurrently(itertools.starmap(ready, enumerate(processes)))


async def reach(client: ServerClient, needs: str, timeout: float, progress: Say = lambda _: None) -> ServerInfo:
    """Wait until a server that is attached to answers. `needs`: how it must be started. See `answer_within`."""

    async def ask() -> ServerInfo:
        # A trainer that was killed may have left it paused; then it would not answer a check.
        await client.resume()
        await client.check(min(timeout, 30.0))
        return await client.info()

    return await answer_within(timeout, ask, needs, progress)


def is_final(error: BaseException) -> bool:
    """Check whether a server that is attached to answers what waiting does not change."""
    return isinstance(error, RequestError | WrongServer) or (
        isinstance(error, ServerFailed) and error.status in (*WRONG_KEY, *NO_SUCH_PATH)
    )


async def answer_within(
    timeout: float, ask: Callable[[], Awaitable[Answer]], needs: str, progress: Say = lambda _: None
) -> Answer:
    """Ask a server that is attached to until it does not fail.

    Raises ConfigError, which says what the server needs, at an answer that waiting does not change, and EngineError
    after `timeout` seconds.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    told = False
    while True:
        try:
            return await ask()
        except (ServerFailed, RequestError) as error:
            if is_final(error):
                is_key = isinstance(error, ServerFailed) and error.status in WRONG_KEY
                remedy = f"name the variable with its key: {ROLLOUT}.server_api_key_env" if is_key else needs
                raise ConfigError(f"{ROLLOUT}.server_urls: {error}; {remedy}") from error
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
    frozen: Collection[str] = (),
) -> WeightSender:
    """Build the sender that update_weights_transport and update_weights_delta ask for. Raises ConfigError.

    `checksums` makes the expected checksums of the server software; used with update_weights_checksum.
    `notify` shows why a server is sent all weights. `frozen`: names of adapters that servers have next to the policy's.
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
    if rollout.update_weights_delta:
        sender = DeltaSender(sender, checksums if rollout.update_weights_checksum else None, notify)
    if config.served_adapters is not None:
        sender = AdapterSender(sender, folder / "adapters", notify, frozen)
    return sender


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
