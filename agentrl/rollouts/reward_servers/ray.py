"""Servers of the reward model on Ray's machines, with devices of their own."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.config import Config
from agentrl.remote.router import ServerAccess
from agentrl.rollouts.reward_servers.local import RewardServers, first_gpus, reward_servers
from agentrl.runtime.ray.pool import ask, collect, end, placed
from agentrl.runtime.ray.rank import Failure
from agentrl.runtime.ray.session import Surroundings

if TYPE_CHECKING:
    from ray.actor import ActorProxy

logger = logging.getLogger(__name__)
ENDED_WITHIN = 30.0
"""Seconds that a machine's servers have to end."""


class ServerHost:
    """A Ray actor: the servers of one machine."""

    def __init__(self, surroundings: Surroundings) -> None:
        surroundings.enter()
        self._servers: RewardServers | None = None

    def start(self, config: Config, device: str, key: str, folder: Path) -> ServerAccess | Failure:
        """Start them, and say where they are."""
        try:
            host = ray.util.get_node_ip_address()
            keys = config.reward_model
            gpus = [0] if device == "cpu" else first_gpus(keys.n_gpus_per_node, keys.rollout.tensor_model_parallel_size)
            self._servers = reward_servers(config, device, gpus, key, folder / host, logger.warning, host)
            return self._servers.start(lambda _: None)
        except Exception as error:
            return Failure.from_error(error)

    def close(self) -> None:
        """End them."""
        if self._servers is not None:
            self._servers.close()


class RayRewardServers:
    """The reward model's machines, `reward_model.nnodes` of them with `n_gpus_per_node` devices each."""

    def __init__(self, config: Config, device: str, folder: Path) -> None:
        """Raises ConfigError when the cluster has no room."""
        self._config, self._device, self._folder = config, device, folder
        keys = config.reward_model
        gpus = {"GPU": float(keys.n_gpus_per_node)} if device == "cuda" else {}
        self._actors: list[ActorProxy[ServerHost]] = []
        self._groups: list[PlacementGroup] = placed(
            [[{"CPU": 1.0, **gpus}]] * keys.nnodes,
            f"reward_model.nnodes={keys.nnodes} machines with reward_model.n_gpus_per_node={keys.n_gpus_per_node}",
        )

    def start(self) -> ServerAccess:
        """Start all servers, and wait until all answer. Raises the error that a machine raised."""
        kind = ray.remote(ServerHost)
        gpus = self._config.reward_model.n_gpus_per_node if self._device == "cuda" else 0
        for group in self._groups:
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            options = kind.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=place)
            self._actors.append(options.remote(Surroundings.here()))
        key = secrets.token_urlsafe(32)
        calls = [ask(actor, ServerHost.start, self._config, self._device, key, self._folder) for actor in self._actors]
        found = collect(calls, "the start of the reward model's servers")
        return ServerAccess(tuple(url for servers in found for url in servers.urls), key)

    def close(self) -> None:
        """End all servers."""
        closing = [ask(actor, ServerHost.close) for actor in self._actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=ENDED_WITHIN)
        for actor in self._actors:
            end(actor)
        for group in self._groups:
            remove_placement_group(group)
