"""Choice between adapters that servers serve as they are, and adapters that are merged into the weights."""

from __future__ import annotations

from collections.abc import Collection

from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.rollout import RolloutConfig
from agentrl.errors import ConfigError

SERVED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Last parts of the names of layers whose adapters servers run."""
VLLM_RANK = 512
"""Largest rank of adapters that vLLM serves."""


def most_adapters(frozen: Collection[str]) -> int:
    """Count the adapters that a server serves at once: the policy's, its next one, and the frozen ones."""
    return 2 + len(frozen)


def why_not_served(model: PolicyModelConfig, rollout: RolloutConfig, keep_kv_cache: bool) -> str | None:
    """Say why the engine cannot be given adapters as they are; None where it can."""
    if rollout.name not in ("sglang", "vllm", "mixed"):
        return f"the engine {rollout.name} serves none"
    if keep_kv_cache:
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
