"""The vLLM engine from the config."""

from __future__ import annotations

from dataclasses import replace

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.vllm_arguments import EXTRA_KEY
from agentrl.engines.builder import EngineSetting
from agentrl.engines.servers.client import ServerInfo
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.start import ROLLOUT, Software, build_engine
from agentrl.engines.vllm.checksums import Arrived
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.errors import ConfigError
from agentrl.system.loop_thread import LoopThread


def build(setting: EngineSetting, loop: LoopThread) -> ServerEngine:
    """Start vLLM servers, or attach to them. See `EngineBuilder`."""
    return build_engine(VLLM, setting, loop)


def server_arguments(config: RolloutsConfig, device: str, max_model_len: int, number: int) -> VLLMArguments:
    """Make the arguments of server `number`, which has the next tensor_model_parallel_size GPUs of this machine."""
    rollout = config.actor_rollout_ref.rollout
    arguments = VLLMArguments.from_config(config, device, max_model_len)
    return replace(arguments.at(number * rollout.tensor_model_parallel_size), extra=rollout.engine_kwargs.vllm)


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
    arguments=server_arguments,
    kind=VLLMArguments,
    process=VLLMProcess,
    client=VLLMClient,
    check_attached=check_attached,
    engine=VLLMEngine,
    checksums=Arrived,
)
