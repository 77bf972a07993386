"""The vLLM engine from the config."""

from __future__ import annotations

from dataclasses import replace

from agentrl.config.sections.model import PlainModelConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.vllm_arguments import EXTRA_KEY
from agentrl.engines.builder import EngineSetting
from agentrl.engines.servers.adapters import check_rank
from agentrl.engines.servers.client import ServerInfo
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.start import ROLLOUT, Software, build_engine
from agentrl.engines.vllm.checksums import Arrived
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import VLLMArguments, lora_rank
from agentrl.engines.vllm.plugin import NEEDED
from agentrl.engines.vllm.process import LORA_ROUTES, VLLMProcess
from agentrl.errors import ConfigError
from agentrl.model.read_config import read_config
from agentrl.system.loop_thread import LoopThread


def build(setting: EngineSetting, loop: LoopThread) -> ServerEngine:
    """Start vLLM servers, or attach to them. See `EngineBuilder`."""
    if setting.config.actor_rollout_ref.rollout.server_urls is None:
        check_family(setting.config.actor_rollout_ref.model, setting.device)
    return build_engine(VLLM, setting, loop)


def check_family(model: PlainModelConfig, device: str) -> None:
    """Raise ConfigError for a model whose layers started servers cannot run; by its config, no weights are read."""
    if device != "cpu":
        return
    config = read_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code).get_text_config()
    if getattr(config, "linear_key_head_dim", None) is not None:
        raise ConfigError(
            f"{ROLLOUT}.name=vllm, {model.path}: gated delta layers of the family {config.model_type} run in bfloat16 "
            f"alone in vLLM on a CPU, whose servers compute in float32. Set {ROLLOUT}.name=embedded"
        )


def server_arguments(config: RolloutsConfig, device: str, max_model_len: int, number: int) -> VLLMArguments:
    """Make the arguments of server `number`, which has the next tensor_model_parallel_size GPUs of this machine."""
    rollout, adapters = config.actor_rollout_ref.rollout, config.served_adapters
    arguments = VLLMArguments.from_config(config, device, max_model_len)
    return replace(
        arguments.at(number * rollout.tensor_model_parallel_size),
        lora_rank=adapters.lora_rank if adapters is not None else 0,
        frozen=rollout.frozen_adapters,
        extra=rollout.engine_kwargs.vllm,
    )


def check(info: ServerInfo, url: str, config: RolloutsConfig) -> None:
    """Check that a server serves the adapters that it is to be sent. Raises ConfigError."""
    check_rank(
        info,
        url,
        config,
        lambda rank, most: f"{LORA_ROUTES}=1 and --enable-lora --max-lora-rank {lora_rank(rank)} --max-loras {most}",
    )


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
    needs="with agentrl installed there, start it by VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve "
    + " ".join(["MODEL", *NEEDED]),
    check=check,
    check_attached=check_attached,
    engine=VLLMEngine,
    checksums=Arrived,
)
