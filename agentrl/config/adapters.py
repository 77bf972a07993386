"""Choice between adapters that servers serve as they are, and adapters that are merged into the weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.training import Config
from agentrl.errors import ConfigError

SERVED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Last parts of the names of layers whose adapters servers run."""
VLLM_RANK = 512
"""Largest rank of adapters that vLLM serves."""


def served_adapters(config: RolloutsConfig) -> PolicyModelConfig | None:
    """Return the keys of the adapters that servers are sent, and serve unmerged; None where they are merged."""
    if not isinstance(config, Config) or not config.actor_rollout_ref.model.lora_rank:
        return None
    model = config.actor_rollout_ref.model
    return None if model.lora_merge else model


def frozen_adapters(config: RolloutsConfig) -> dict[str, str]:
    """List the adapters that servers serve next to the policy's: their folders, absolute, by name."""
    roles = config.actor_rollout_ref.rollout.roles.values()
    return {role.policy: str(Path(role.adapter).absolute()) for role in roles if role.adapter is not None}


def most_adapters(frozen: Collection[str]) -> int:
    """Count the adapters that a server serves at once: the policy's, its next one, and the frozen ones."""
    return 2 + len(frozen)


def frees_weights(config: RolloutsConfig) -> bool:
    """Say whether a server's weights are freed during an update. Weights that later updates build on are kept."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.free_cache_engine and not rollout.update_weights_delta and served_adapters(config) is None


def why_not_served(config: Config) -> str | None:
    """Say why the engine cannot be given adapters as they are; None where it can."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if rollout.name not in ("sglang", "vllm", "mixed"):
        return f"the engine {rollout.name} serves none"
    if config.async_training.keep_kv_cache:
        return "with async_training.keep_kv_cache=true a request runs on, and servers would run it with the old ones"
    if rollout.name != "sglang" and model.lora_rank > VLLM_RANK:
        return f"vLLM serves adapters of rank {VLLM_RANK} at most"
    if model.target_modules != "all-linear" and (others := unserved(model.target_modules)):
        return f"servers run none of {', '.join(others)}"
    return None


def check_served(layers: Collection[str]) -> None:
    """Check that servers run the adapters of a model's layers. Raises ConfigError."""
    if others := unserved(layers):
        raise ConfigError(
            f"actor_rollout_ref.model.lora_merge=false: servers run no adapters of {', '.join(others)}, which "
            f"target_modules gives some: name {', '.join(SERVED_LAYERS)} or some of them, or set lora_merge=true"
        )


def unserved(layers: Collection[str]) -> list[str]:
    """List the last parts of layers' names whose adapters servers do not run."""
    return sorted({name.rpartition(".")[2] for name in layers} - set(SERVED_LAYERS))
