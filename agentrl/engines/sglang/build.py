"""The SGLang engine from the config: starts servers or attaches to them, and chooses how they are sent weights."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch

from agentrl.config.sections.model import PlainModelConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.training import Config
from agentrl.config.sglang_arguments import EXTRA_KEY
from agentrl.engines.builder import EngineSetting
from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import ServerInfo
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.start import ROLLOUT, Say, reach, start_all, weight_sender
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.sglang.checksums import Expectation
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.options import RESERVED, ServerArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.errors import ConfigError, TrainingError
from agentrl.model.read_config import read_config
from agentrl.model.trial import keeps_states
from agentrl.remote.credentials import from_environment
from agentrl.system.http import allow_many_files, http_client
from agentrl.system.loop_thread import LoopThread

_NOT_IN_SGLANG = ("olmo_hybrid",)
"""Families with states that SGLang 0.5.23 has no model of."""


def build(setting: EngineSetting, loop: LoopThread) -> SGLangEngine:
    """Start SGLang servers, or attach to them. See `EngineBuilder`."""
    config, reporter = setting.config, setting.reporter
    rollout = config.actor_rollout_ref.rollout
    if rollout.free_cache_engine and setting.device == "cpu":
        raise ConfigError(f"{ROLLOUT}.free_cache_engine=true frees memory of a GPU, and this machine has none")
    if rollout.server_urls is None:
        check_family(config.actor_rollout_ref.model, setting.device)
    verb = "start" if rollout.server_urls is None else "reach"
    with reporter.stage(f"{verb} SGLang servers"):
        starting = start_engine(
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


def check_family(model: PlainModelConfig, device: str) -> None:
    """Raise ConfigError for a model with states that started servers cannot run; by its config, no weights are read."""
    override, trust = model.override_config, model.trust_remote_code
    if not keeps_states(model.path, override, trust_remote_code=trust):
        return
    family = read_config(model.path, override, trust_remote_code=trust).get_text_config().model_type
    if family in _NOT_IN_SGLANG:
        why = f"SGLang has no model of the family {family}"
    elif device == "cpu":
        why = f"layers of the family {family} have a state, and SGLang's kernels for them run on GPUs alone"
    else:
        return
    raise ConfigError(f"{ROLLOUT}.name=sglang, {model.path}: {why}. Set {ROLLOUT}.name=embedded")


async def start_engine(
    config: RolloutsConfig, device: str, max_model_len: int, folder: Path, *, notify: Say, progress: Say
) -> SGLangEngine:
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
    http = http_client()
    processes: list[SGLangProcess] = []
    try:
        if rollout.server_urls is None:
            processes = server_processes(config, device, max_model_len, folder)
            try:
                await start_all(processes, rollout.server_start_timeout, progress)
            except EngineError as error:
                raise EngineError(f"{error}\n{started_with(config)}") from error
            servers = [Server(SGLangClient(process.url, http, process.key), process) for process in processes]
            infos = [await server.client.info() for server in servers]
        else:
            variable = rollout.server_api_key_env
            key = None if variable is None else from_environment(variable)
            servers = [Server(SGLangClient(url, http, key)) for url in rollout.server_urls]
            infos = await attach_all(servers, facts, rollout.server_start_timeout, max_model_len, progress)
        if keeps(config):
            check_steps(infos, [server.url for server in servers])
        timings = Timings(
            check_interval=rollout.health_check_interval,
            start_timeout=rollout.server_start_timeout,
            restarts=rollout.max_server_restarts,
        )
        return SGLangEngine(
            servers,
            http,
            facts,
            weight_sender(config, device, [server.url for server in servers], folder, Expectation, notify),
            max_model_len=max_model_len,
            deterministic=all(info.deterministic for info in infos),
            free_weights=rollout.free_cache_engine,
            notify=notify,
            timings=timings,
            keep_kv_cache=keeps(config),
        )
    except BaseException:
        for process in processes:
            process.stop()
        await http.close()
        raise


def server_processes(config: RolloutsConfig, device: str, max_model_len: int, folder: Path) -> list[SGLangProcess]:
    """Prepare the servers; each has the next tensor_model_parallel_size GPUs of this machine. Raises ConfigError."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    ranks = rollout.tensor_model_parallel_size
    if unset := [name for name in rollout.server_pass_env if name not in os.environ]:
        raise ConfigError(
            f"{ROLLOUT}.server_pass_env: {', '.join(unset)} not set in the environment; export before the start"
        )
    if device == "cuda" and rollout.num_servers * ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{ROLLOUT}.num_servers={rollout.num_servers} with {ROLLOUT}.tensor_model_parallel_size={ranks} needs "
            f"{rollout.num_servers * ranks} GPUs; this machine has {torch.cuda.device_count()}"
        )
    if device == "cpu" and ranks > 1:
        raise ConfigError(f"{ROLLOUT}.tensor_model_parallel_size={ranks} needs as many GPUs; on a CPU it must be 1")
    return [
        SGLangProcess(
            ServerArguments(
                model.path,
                device=device,
                dtype=model.dtype,
                tensor_model_parallel_size=ranks,
                base_gpu_id=number * ranks,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                context_length=max_model_len,
                trust_remote_code=model.trust_remote_code,
                override_config=model.override_config,
                max_num_seqs=rollout.max_num_seqs,
                enable_memory_saver=rollout.free_cache_engine,
                plans_ahead=not keeps(config),
                takes_deltas=rollout.update_weights_delta,
                extra=rollout.engine_kwargs.sglang,
            ),
            None,
            folder / "servers" / f"{number}.log",
            key=secrets.token_urlsafe(32),
            pass_env=rollout.server_pass_env,
        )
        for number in range(rollout.num_servers)
    ]


def keeps(config: RolloutsConfig) -> bool:
    """Say whether requests that run while weights are sent keep their keys and values."""
    return isinstance(config, Config) and config.async_training.keep_kv_cache


def check_steps(infos: Sequence[ServerInfo], urls: Sequence[str]) -> None:
    """Check that servers end each step before a pause, so that no token is counted to weights that came after it.

    Raises ConfigError.
    """
    for info, url in zip(infos, urls, strict=True):
        if info.plans_ahead:
            raise ConfigError(
                f"async_training.keep_kv_cache=true: {url} plans each step while the one before runs, so that tokens "
                "of older weights would be counted to newer ones. Start it with --disable-overlap-schedule "
                f"(agentrl's own servers are, unless {EXTRA_KEY} says otherwise), or set keep_kv_cache=false"
            )


def started_with(config: RolloutsConfig) -> str:
    """List the keys that a failed start may come from, with their values."""
    rollout = config.actor_rollout_ref.rollout
    keys = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        f"{ROLLOUT}.server_start_timeout": f"{rollout.server_start_timeout:g}",
        **{f"{EXTRA_KEY}.{name}": value for name, value in rollout.engine_kwargs.sglang.items()},
    }
    return "It was started with " + ", ".join(f"{key}={value}" for key, value in keys.items())


async def attach_all(
    servers: Sequence[Server], facts: ModelFacts, timeout: float, max_model_len: int, progress: Say
) -> list[ServerInfo]:
    """Wait until all servers answer. Raises ConfigError for a server that cannot serve this job."""
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
