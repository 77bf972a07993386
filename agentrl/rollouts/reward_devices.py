"""Arguments and GPUs of the servers of a reward model that scorers ask."""

from __future__ import annotations

import torch

from agentrl.config import Config
from agentrl.engines.sglang.options import ServerArguments
from agentrl.errors import ConfigError

ENGINE = "reward_model.rollout"


def server_arguments(config: Config, device: str, host: str = "127.0.0.1") -> ServerArguments:
    """Return what each server is started with. Raises ConfigError."""
    keys = config.reward_model
    if device == "cpu" and keys.rollout.tensor_model_parallel_size > 1:
        raise ConfigError(f"{ENGINE}.tensor_model_parallel_size above 1 needs GPUs; on a CPU it must be 1")
    return ServerArguments(
        str(keys.model.path),
        device=device,
        dtype=config.actor_rollout_ref.model.dtype,
        tensor_model_parallel_size=keys.rollout.tensor_model_parallel_size,
        gpu_memory_utilization=keys.rollout.gpu_memory_utilization,
        trust_remote_code=keys.model.trust_remote_code,
        host=host,
        extra=keys.rollout.engine_kwargs.sglang,
    )


def first_gpus(devices: int, size: int) -> list[int]:
    """Return the first GPU of each server that `devices` GPUs hold. Raises ConfigError where none fits."""
    if devices < size:
        raise ConfigError(
            f"{ENGINE}.tensor_model_parallel_size={size} needs {size} GPUs; the reward model has {devices}"
        )
    return [number * size for number in range(devices // size)]


def shared_gpus(config: Config, device: str) -> list[int]:
    """Return the first GPU of each server on this machine: after the trainer's, or among them. Raises ConfigError."""
    if device == "cpu":
        return [0]
    rollout, size = config.actor_rollout_ref.rollout, config.reward_model.rollout.tensor_model_parallel_size
    taken = max(config.trainer.n_gpus_per_node, rollout.num_servers * rollout.tensor_model_parallel_size)
    there = torch.cuda.device_count()
    free = there - taken
    return [taken + one for one in first_gpus(free, size)] if free >= size else first_gpus(there, size)[:1]
