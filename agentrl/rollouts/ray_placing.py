"""How a rollout worker is made under Ray: its actor, its place in the cluster, its part of the config."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.errors import ConfigError
from agentrl.remote.router import ServerAccess
from agentrl.rollouts.context import FirstRows
from agentrl.rollouts.objects import UserObjects
from agentrl.rollouts.ray_worker import RolloutWorker
from agentrl.runtime.ray.pool import ask, placed
from agentrl.runtime.ray.session import Surroundings

if TYPE_CHECKING:
    from ray.actor import ActorProxy

Placing = dict[str, float | NodeAffinitySchedulingStrategy | PlacementGroupSchedulingStrategy]
"""Options of an actor that say where it runs."""


class WorkerMaker:
    """Maker of a run's rollout workers.

    Args:
        nodes: names the Ray nodes; on each, one worker shares the devices with the policy. They change where ranks
            restart on other machines. None: devices of their own, as rollout.nnodes and rollout.n_gpus_per_node say.
        first: rows on which the first worker tries scorers and interactions; all workers have the same ones.
        servers: the servers of a generative reward model.
    """

    def __init__(
        self,
        config: RolloutsConfig,
        device: str,
        run_dir: Path,
        nodes: Callable[[], Sequence[str]] | None,
        objects: UserObjects,
        first: FirstRows,
        servers: ServerAccess | None = None,
    ) -> None:
        """Raises ConfigError when the cluster has no room."""
        self.config, self.nodes, self._device, self._run_dir = config, nodes, device, run_dir.absolute()
        try:
            self._objects = ray.put(objects)
        except Exception as error:  # whatever an object's own pickling raises
            raise ConfigError(
                "loops, tools, interactions and the reward function are copied to Ray's workers, and one of them "
                f"cannot be pickled: {type(error).__name__}: {error}\nHave it open what it needs in its start(run), or "
                "name it in the config, so that each worker makes its own"
            ) from error
        self._first, self._servers = first, servers
        self._groups: list[PlacementGroup] = []
        if nodes is None:
            rollout = config.actor_rollout_ref.rollout
            gpus = {"GPU": float(rollout.n_gpus_per_node)} if device == "cuda" else {}
            self._groups = placed(
                [[{"CPU": 1.0, **gpus}]] * rollout.nnodes,
                f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} rollout workers"
                + (f" with {rollout.n_gpus_per_node} GPUs each" if gpus else ""),
            )
        self.count = len(self._groups) if nodes is None else len(nodes())

    def make(self, number: int) -> ActorProxy[RolloutWorker]:
        """Make the process of worker `number`."""
        variables = {
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "OMP_WAIT_POLICY": "PASSIVE",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without GPUs of its own it sees all of the machine
        }
        kind = ray.remote(concurrency_groups={"status": 1, "groups": 1})(RolloutWorker)  # type: ignore[call-overload]
        options = kind.options(runtime_env={"env_vars": variables}, **self._placing(number))
        actor: ActorProxy[RolloutWorker] = options.remote(Surroundings.here())
        return actor

    def open(self, number: int, worker: ActorProxy[RolloutWorker]) -> ray.ObjectRef[object]:
        """Ask a worker to start its engine and tools; the call."""
        part = part_of(self.config, number, self.count)
        objects = cast(UserObjects, self._objects)  # Ray hands over what the reference refers to
        share, first = (number + 1, self.count), self._first if number == 0 else FirstRows()
        return ask(worker, RolloutWorker.open, part, self._device, self._run_dir, share, objects, first, self._servers)

    def has_room(self, number: int, seconds: float) -> bool:
        """Wait so long at most, and say whether a machine has room for the worker: always next to a rank."""
        return self.nodes is not None or bool(self._groups[number].wait(seconds))

    def close(self) -> None:
        """Give the cluster its room back."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    def _placing(self, number: int) -> Placing:
        """Return Ray's placement options for a worker."""
        if self.nodes is not None:
            # Where the ranks have all CPUs of a machine, a worker that asks for one would never start.
            return {
                "num_cpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(self.nodes()[number], soft=False),
            }
        return {
            "num_cpus": 1,
            "num_gpus": float(self.config.actor_rollout_ref.rollout.n_gpus_per_node) if self._device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[number], placement_group_bundle_index=0
            ),
        }


def part_of(config: RolloutsConfig, number: int, count: int) -> RolloutsConfig:
    """Return the config of one of `count` workers, with its share of the servers and of the run's limits."""

    def share(limit: float | None) -> float | None:
        return limit if limit is None else limit / count if isinstance(limit, float) else -(-limit // count)

    roles, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    urls = None if rollout.server_urls is None else rollout.server_urls[number::count]
    agent = rollout.agent.model_copy(update={"max_concurrent": share(rollout.agent.max_concurrent)})
    tools = {name: share(getattr(config.tools, name)) for name in ("max_concurrent", "max_rate")}
    scoring = config.reward_model
    reward = {"max_concurrent": share(scoring.max_concurrent)} | {
        name: asked.model_copy(update={"max_concurrent": share(asked.max_concurrent)})
        for name, asked in (("sandbox_fusion", scoring.sandbox_fusion), ("judge", scoring.judge))
    }
    return config.model_copy(
        update={
            "actor_rollout_ref": roles.model_copy(
                update={"rollout": rollout.model_copy(update={"server_urls": urls, "agent": agent})}
            ),
            "tools": config.tools.model_copy(update=tools),
            "reward_model": config.reward_model.model_copy(update=reward),
        }
    )
