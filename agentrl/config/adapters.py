"""Choice between adapters that servers serve as they are, and adapters that are merged into the weights."""

from __future__ import annotations

from collections.abc import Collection

from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.training import Config

SERVED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Last parts of the names of layers whose adapters servers run."""


def served_adapters(config: RolloutsConfig) -> PolicyModelConfig | None:
    """Return the keys of the adapters that servers are sent, and serve unmerged; None where they are merged."""
    if not isinstance(config, Config) or not config.actor_rollout_ref.model.lora_rank:
        return None
    model = config.actor_rollout_ref.model
    serves = model.lora_merge is False or (model.lora_merge is None and why_merged(config) is None)
    return model if serves else None


def why_merged(config: Config) -> str | None:
    """Say why the engine is given merged adapters where lora_merge is null; None where it serves them as they are."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if rollout.name != "sglang":
        return f"the engine {rollout.name} serves none"
    if config.uses_ray:
        return "with Ray, rollout workers read merged weights from the ranks"
    if config.async_training.keep_kv_cache:
        return "with async_training.keep_kv_cache=true a request runs on, and SGLang would run it with the old ones"
    if model.target_modules != "all-linear" and (others := unserved(model.target_modules)):
        return f"servers run none of {', '.join(others)}"
    if rollout.server_urls is not None and model.lora_merge is None:
        return "servers of rollout.server_urls may run without --enable-lora; with it, set lora_merge=false"
    return None


def unserved(layers: Collection[str]) -> list[str]:
    """List the last parts of layers' names whose adapters servers do not run."""
    return sorted({name.rpartition(".")[2] for name in layers} - set(SERVED_LAYERS))
