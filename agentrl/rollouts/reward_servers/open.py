"""Servers of the reward model that scorers ask: servers that run already, or servers for the time of a run.

They have devices of their own on Ray's machines, where the config gives the reward model some. Otherwise they share
this machine's GPUs, after the trainer's GPUs where there are enough.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from agentrl.config import Config
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import EngineError
from agentrl.errors import TrainingError
from agentrl.remote.router import ServerAccess
from agentrl.rollouts.reward_servers.local import first_gpus, reward_servers
from agentrl.system.reporter import Reporter


@contextmanager
def open_reward_servers(
    config: RolloutsConfig, device: str, run_dir: Path, reporter: Reporter
) -> Iterator[ServerAccess | None]:
    """Yield the servers of the generative reward model; None without such a model. Raises UserError."""
    if not isinstance(config, Config) or not config.reward_model.generates:
        yield None
        return
    keys, folder = config.reward_model, run_dir.absolute() / "reward_servers"
    if keys.rollout.server_urls is not None:
        yield ServerAccess(tuple(keys.rollout.server_urls))
        return
    if keys.enable_resource_pool:
        from agentrl.rollouts.reward_servers.ray import RayRewardServers  # Ray is an extra

        with closing(RayRewardServers(config, device, folder)) as on_ray:
            with reporter.stage("start the reward model's servers"):
                servers = on_ray.start()
            yield servers
        return
    key = secrets.token_urlsafe(32)
    here = reward_servers(config, device, shared_gpus(config, device), key, folder, reporter.warn)
    try:
        with reporter.stage("start the reward model's servers"):
            try:
                servers = here.start(reporter.note)
            except EngineError as error:
                raise TrainingError(f"the reward model: {error}") from error
        yield servers
    finally:
        here.close()


def shared_gpus(config: Config, device: str) -> list[int]:
    """Return the first GPU of each server on this machine: after the trainer's, or among them. Raises ConfigError."""
    if device == "cpu":
        return [0]
    rollout, size = config.actor_rollout_ref.rollout, config.reward_model.rollout.tensor_model_parallel_size
    taken = max(config.trainer.n_gpus_per_node, rollout.num_servers * rollout.tensor_model_parallel_size)
    there = torch.cuda.device_count()
    free = there - taken
    return [taken + one for one in first_gpus(free, size)] if free >= size else first_gpus(there, size)[:1]
