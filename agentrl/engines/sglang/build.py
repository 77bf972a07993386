"""The SGLang engine from the config."""

from __future__ import annotations

from dataclasses import replace

from agentrl.config.sections.model import PlainModelConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sglang_arguments import EXTRA_KEY
from agentrl.engines.builder import EngineSetting
from agentrl.engines.servers.adapters import check_rank
from agentrl.engines.servers.client import ServerInfo
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.start import ROLLOUT, Software, build_engine, keeps
from agentrl.engines.sglang.checksums import Expectation
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.options import RESERVED, SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.errors import ConfigError
from agentrl.model.read_config import read_config
from agentrl.model.trial import keeps_states
from agentrl.system.loop_thread import LoopThread

_NOT_IN_SGLANG = ("olmo_hybrid",)
"""Families with states that SGLang 0.5.23 has no model of."""


def build(setting: EngineSetting, loop: LoopThread) -> ServerEngine:
    """Start SGLang servers, or attach to them. See `EngineBuilder`."""
    if setting.config.actor_rollout_ref.rollout.server_urls is None:
        check_family(setting.config.actor_rollout_ref.model, setting.device)
    return build_engine(SGLANG, setting, loop)


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


def server_arguments(config: RolloutsConfig, device: str, max_model_len: int, number: int) -> SGLangArguments:
    """Make the arguments of server `number`, which has the next tensor_model_parallel_size GPUs of this machine."""
    rollout, adapters = config.actor_rollout_ref.rollout, config.served_adapters
    return replace(
        SGLangArguments.from_config(config, device, max_model_len).at(number * rollout.tensor_model_parallel_size),
        plans_ahead=not keeps(config),
        takes_deltas=rollout.update_weights_delta,
        lora_rank=adapters.lora_rank if adapters is not None else 0,
        frozen=rollout.frozen_adapters,
        extra=rollout.engine_kwargs.sglang,
    )


def check(info: ServerInfo, url: str, config: RolloutsConfig) -> None:
    """Check that a server ends each step before a pause, so that no token is counted to weights that came after it.

    Raises ConfigError, also where it does not serve the adapters that it is to be sent.
    """
    check_rank(
        info,
        url,
        config,
        lambda rank, most: f"--enable-lora --max-lora-rank {rank} --max-loras-per-batch {most}",
    )
    if keeps(config) and info.plans_ahead:
        raise ConfigError(
            f"async_training.keep_kv_cache=true: {url} plans each step while the one before runs, so that tokens "
            "of older weights would be counted to newer ones. Start it with --disable-overlap-schedule "
            f"(agentrl's own servers are, unless {EXTRA_KEY} says otherwise), or set keep_kv_cache=false"
        )


def check_attached(info: ServerInfo, url: str, max_model_len: int) -> None:
    """Check that a server that somebody else started can serve the job. Raises ConfigError."""
    if info.context_length < max_model_len + RESERVED:
        raise ConfigError(
            f"{ROLLOUT}.server_urls: {url} has a context of {info.context_length} tokens; this job needs "
            f"{max_model_len} and {RESERVED} that SGLang does not fill: start it with --context-length "
            f"{max_model_len + RESERVED}"
        )
    if not info.incremental:
        raise ConfigError(
            f"{ROLLOUT}.server_urls: start {url} with --incremental-streaming-output, "
            "which this job's way of reading answers needs"
        )


SGLANG = Software(
    name="SGLang",
    own_arguments=EXTRA_KEY,
    arguments=server_arguments,
    kind=SGLangArguments,
    process=SGLangProcess,
    client=SGLangClient,
    needs="start an SGLang server there, with --incremental-streaming-output",
    check=check,
    check_attached=check_attached,
    engine=SGLangEngine,
    checksums=Expectation,
)
