"""The user's own arguments of SGLang servers: which of them other keys, or agentrl itself, set."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl.errors import ConfigError

EXTRA_KEY = "actor_rollout_ref.rollout.engine_kwargs.sglang"
"""The config key of the user's own SGLang arguments."""

SET_BY = {
    "host": "the servers' addresses are agentrl's to choose",
    "port": "the servers' addresses are agentrl's to choose",
    "model": "set actor_rollout_ref.model.path",
    "model_path": "set actor_rollout_ref.model.path",
    "device": "set trainer.device",
    "tp": "set actor_rollout_ref.rollout.tensor_model_parallel_size",
    "tp_size": "set actor_rollout_ref.rollout.tensor_model_parallel_size",
    "tensor_parallel_size": "set actor_rollout_ref.rollout.tensor_model_parallel_size",
    "mem_fraction_static": "set actor_rollout_ref.rollout.gpu_memory_utilization",
    "context_length": "set actor_rollout_ref.rollout.max_model_len",
    "max_running_requests": "set actor_rollout_ref.rollout.max_num_seqs",
    "base_gpu_id": "agentrl gives each server its GPUs",
    "weight_version": "agentrl counts the versions of the weights",
    "incremental_streaming_output": "agentrl reads the stream of new tokens",
    "config": "give its arguments here",
    "nnodes": "a server of agentrl's is on one host",
    "node_rank": "a server of agentrl's is on one host",
    "grpc_mode": "agentrl speaks HTTP to it",
    "smg_grpc_mode": "agentrl speaks HTTP to it",
    "encoder_only": "agentrl needs a server that generates",
    "is_embedding": "agentrl needs a server that generates",
    "api_key": "agentrl gives each of its servers a random one",
    "admin_api_key": "agentrl gives each of its servers a random api_key, for everything",
    "grpc_port": "agentrl speaks HTTP to it, and gRPC asks for no key",
    "ssl_keyfile": "agentrl speaks plain HTTP to it",
    "ssl_certfile": "agentrl speaks plain HTTP to it",
}
"""SGLang's arguments that a user may not give, each with the alternative."""


def check_extra(extra: Iterable[str]) -> None:
    """Raises ConfigError for one of the user's arguments that agentrl sets itself or cannot work with."""
    for name in extra:
        plain = plain_name(name)
        if plain in SET_BY:
            raise ConfigError(f"{EXTRA_KEY}.{name}: this argument cannot be given: {SET_BY[plain]}")


def plain_name(name: str) -> str:
    """`--tp-size`, `tp-size` and `tp_size` are one argument."""
    return name.lstrip("-").replace("-", "_")
