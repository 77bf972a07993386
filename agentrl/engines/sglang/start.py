"""From the config to a running engine: servers started or attached to, and a way to send them weights."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch

from agentrl.config import Config
from agentrl.engines.contract import EngineError
from agentrl.engines.servers.engine import SGLangEngine
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.disk import DiskSender
from agentrl.engines.servers.sync.distributed import DistributedSender
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.servers.sync.update import WeightSender
from agentrl.engines.sglang.client import ServerFailed, ServerInfo, SGLangClient
from agentrl.engines.sglang.options import EXTRA_KEY, RESERVED, ServerArguments
from agentrl.errors import ConfigError
from agentrl.system.http import allow_many_files, http_client

ROLLOUT = "actor_rollout_ref.rollout"
LOOK_EVERY = 0.5
"""Seconds between two tries to reach a server that is attached to."""
Told = Callable[[str], None]


async def start_engine(
    config: Config, device: str, max_model_len: int, run_dir: Path, *, notify: Told, progress: Told
) -> SGLangEngine:
    """Start `num_servers` servers, or attach to `server_urls`, and wait until all of them answer.

    Servers that are started write their logs to `run_dir`/servers/. Servers that are attached to have some weights of
    the model; they must be sent the policy's before they generate. `notify` is told what happens to servers later on,
    `progress` what they do while they start. Raises ConfigError or EngineError with the server's own last error; no
    process is left then.
    """
    allow_many_files()
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    facts = ModelFacts.of(model.path, trust_remote_code=model.trust_remote_code)
    if facts.max_positions is not None and max_model_len > facts.max_positions:
        raise ConfigError(
            f"{model.path} was made for contexts of {facts.max_positions} tokens, and this job needs {max_model_len} "
            f"({ROLLOUT}.max_model_len, or data.max_prompt_length + data.max_response_length)"
        )
    http = http_client()
    processes: list[ServerProcess] = []
    try:
        if rollout.server_urls is None:
            processes = server_processes(config, device, max_model_len, run_dir)
            try:
                await start_all(processes, rollout.server_start_timeout, progress)
            except EngineError as error:
                raise EngineError(f"{error}\n{started_with(config)}") from error
            servers = [Server(SGLangClient(process.url, http), process) for process in processes]
            infos = [await server.client.info() for server in servers]
        else:
            servers = [Server(SGLangClient(url, http)) for url in rollout.server_urls]
            infos = await attach_all(servers, facts, rollout.server_start_timeout, max_model_len, progress)
        timings = Timings(
            check_interval=rollout.health_check_interval,
            start_timeout=rollout.server_start_timeout,
            restarts=rollout.max_server_restarts,
        )
        return SGLangEngine(
            servers,
            http,
            facts,
            weight_sender(config, device, [server.url for server in servers], run_dir),
            max_model_len=max_model_len,
            deterministic=all(info.deterministic for info in infos),
            free_weights=rollout.free_cache_engine,
            notify=notify,
            timings=timings,
        )
    except BaseException:
        for process in processes:
            process.stop()
        await http.close()
        raise


def server_processes(config: Config, device: str, max_model_len: int, run_dir: Path) -> list[ServerProcess]:
    """Not yet started. Each server has the next tensor_model_parallel_size GPUs of this machine."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    ranks = rollout.tensor_model_parallel_size
    if device == "cuda" and rollout.num_servers * ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{ROLLOUT}.num_servers={rollout.num_servers} with {ROLLOUT}.tensor_model_parallel_size={ranks} needs "
            f"{rollout.num_servers * ranks} GPUs; this machine has {torch.cuda.device_count()}"
        )
    if device == "cpu" and ranks > 1:
        raise ConfigError(f"{ROLLOUT}.tensor_model_parallel_size={ranks} needs as many GPUs; on a CPU it must be 1")
    return [
        ServerProcess(
            ServerArguments(
                model.path,
                device=device,
                dtype=model.dtype,
                tensor_model_parallel_size=ranks,
                base_gpu_id=number * ranks,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                context_length=max_model_len,
                trust_remote_code=model.trust_remote_code,
                max_num_seqs=rollout.max_num_seqs,
                enable_memory_saver=rollout.free_cache_engine,
                extra=rollout.engine_kwargs.sglang,
            ),
            None,
            run_dir / "servers" / f"{number}.log",
        )
        for number in range(rollout.num_servers)
    ]


async def start_all(processes: Sequence[ServerProcess], timeout: float, progress: Told) -> None:
    """All at once; the first failure ends the wait. The caller stops them."""
    for process in processes:
        process.start()
    try:
        async with asyncio.TaskGroup() as group:
            for number, process in enumerate(processes):
                group.create_task(process.ready(timeout, partial(tell, progress, number)))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


def started_with(config: Config) -> str:
    """The keys that a failed start may come from."""
    rollout = config.actor_rollout_ref.rollout
    keys = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        f"{ROLLOUT}.server_start_timeout": f"{rollout.server_start_timeout:g}",
        **{f"{EXTRA_KEY}.{name}": value for name, value in rollout.engine_kwargs.sglang.items()},
    }
    return "It was started with " + ", ".join(f"{key}={value}" for key, value in keys.items())


def tell(progress: Told, number: int, text: str) -> None:
    progress(f"server {number}: {text}")


async def attach_all(
    servers: Sequence[Server], facts: ModelFacts, timeout: float, max_model_len: int, progress: Told
) -> list[ServerInfo]:
    """Wait until all answer. Raises ConfigError for a server that cannot serve this job."""
    infos = await asyncio.gather(*[reach(server.client, timeout, progress) for server in servers])
    for server, info in zip(servers, infos, strict=True):
        if None not in (info.architecture, facts.architecture) and info.architecture != facts.architecture:
            raise ConfigError(
                f"{ROLLOUT}.server_urls: {server.url} serves a {info.architecture} ({info.model_path}), and the policy "
                f"is a {facts.architecture}: start it with the policy's model"
            )
        if info.context_length < max_model_len + RESERVED:
            raise ConfigError(
                f"{ROLLOUT}.server_urls: {server.url} has a context of {info.context_length} tokens; this job needs "
                f"{max_model_len} and {RESERVED} that SGLang does not fill: start it with --context-length "
                f"{max_model_len + RESERVED}"
            )
        if not info.incremental:
            raise ConfigError(
                f"{ROLLOUT}.server_urls: start {server.url} with --incremental-streaming-output, "
                "which this job's way of reading answers needs"
            )
    return list(infos)


async def reach(client: SGLangClient, timeout: float, progress: Told = lambda _: None) -> ServerInfo:
    """Its info, as soon as it answers. Raises EngineError after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    told = False
    while True:
        try:
            await client.resume()  # paused, as a trainer that was killed leaves it, it would not answer
            await client.check(min(timeout, 30.0))
            return await client.info()
        except ServerFailed as error:
            if loop.time() >= end:
                raise EngineError(f"{ROLLOUT}.server_urls: no answer within {timeout:g} s: {error}") from error
            if not told:
                progress(f"no answer yet, waiting up to {timeout:g} s: {error}")
                told = True
        await asyncio.sleep(LOOK_EVERY)


def weight_sender(config: Config, device: str, urls: Sequence[str], run_dir: Path) -> WeightSender:
    """As update_weights_transport asks for it."""
    rollout = config.actor_rollout_ref.rollout
    # A server on a CPU computes in float32.
    dtype = torch.float32 if device == "cpu" else getattr(torch, config.actor_rollout_ref.model.dtype)
    transport = rollout.update_weights_transport
    local = all(map(is_this_machine, urls))
    if transport == "auto":
        transport = "tensor" if local else "distributed"
    if transport == "tensor" and not local:
        raise ConfigError(
            f"{ROLLOUT}.update_weights_transport=tensor hands over memory, and {', '.join(urls)} are not all on this "
            "machine; use distributed or disk"
        )
    size, checksum = rollout.update_weights_bucket_megabytes << 20, rollout.update_weights_checksum
    if transport == "tensor":
        return TensorSender(dtype, size, device, checksum=checksum)
    if transport == "distributed":
        return DistributedSender(dtype, size, "nccl" if device == "cuda" else "gloo", checksum=checksum)
    return DiskSender(dtype, size, run_dir / "weights", checksum=checksum)


def is_this_machine(url: str) -> bool:
    """Whether the URL's host is a name or an address of this machine."""
    addresses, own = addresses_of(urlsplit(url).hostname or ""), addresses_of(socket.gethostname())
    return bool(addresses) and all(ipaddress.ip_address(it).is_loopback or it in own for it in addresses)


def addresses_of(host: str) -> set[str]:
    """None where the name is unknown, as a container's own may be."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
