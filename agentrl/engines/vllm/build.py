"""The vLLM engine from the config."""

from __future__ import annotations

import secrets
from pathlib import Path

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.vllm_arguments import EXTRA_KEY
from agentrl.engines.builder import EngineSetting
from agentrl.engines.servers.client import ServerInfo
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.start import ROLLOUT, Software, build_engine
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import ServerArguments
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.errors import ConfigError
from agentrl.system.loop_thread import LoopThread


def build(setting: EngineSetting, loop: LoopThread) -> ServerEngine:
    """Start vLLM servers, or attach to them. See `EngineBuilder`."""
    return build_engine(VLLM, setting, loop)


def server_processes(config: RolloutsConfig, device: str, max_model_len: int, folder: Path) -> list[VLLMProcess]:
    """Prepare the servers; each has the next tensor_model_parallel_size GPUs of this machine."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    ranks = rollout.tensor_model_parallel_size
    return [
        VLLMProcess(
            ServerArguments(
                model.path,
                device=device,
                dtype=model.dtype,
                tensor_model_parallel_size=ranks,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                context_length=max_model_len,
                trust_remote_code=model.trust_remote_code,
                override_config=model.override_config,
                max_num_seqs=rollout.max_num_seqs,
                enable_memory_saver=rollout.free_cache_engine,
                extra=rollout.engine_kwargs.vllm,
            ),
            None,
            folder / "servers" / f"{number}.log",
            gpus=range(number * ranks, (number + 1) * ranks) if device == "cuda" else (),
            key=secrets.token_urlsafe(32),
            pass_env=rollout.server_pass_env,
        )
        for number in range(rollout.num_servers)
    ]


def check(info: ServerInfo, url: str, config: RolloutsConfig) -> None:
    """Accept each server: `VLLMClient.info` refuses unsuitable servers."""


def check_attached(info: ServerInfo, url: str, max_model_len: int) -> None:
    """Check that a server that somebody else started can serve the job. Raises ConfigError."""
    if info.context_length < max_model_len:
        raise ConfigError(
            f"{ROLLOUT}.server_urls: {url} has a context of {info.context_length} tokens; this job needs "
            f"{max_model_len}: start it with --max-model-len {max_model_len}"
        )


VLLM = Software(
    name="vLLM",
    own_arguments=EXTRA_KEY,
    processes=server_processes,
    client=VLLMClient,
    check=check,
    check_attached=check_attached,
    engine=VLLMEngine,
    checksums=None,
)
