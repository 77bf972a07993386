"""Which devices of a cluster hold which roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.config import Config, SFTConfig
from agentrl.config.checks import rollout_workers
from agentrl.workers.roles import Role, copies, roles_of


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that are one process group, and hold their parts of some roles."""

    nnodes: int
    n_gpus_per_node: int
    roles: tuple[Role, ...]
    copies: Mapping[Role, int]
    """How many neighbouring ranks are given the same share of a role's work (see `agentrl.workers.roles.copies`)."""
    keys: str
    """The config keys that say how large it is."""

    @property
    def ranks(self) -> int:
        return self.nnodes * self.n_gpus_per_node


def pools_of(config: Config | SFTConfig) -> list[Pool]:
    """The trainer's own, which holds all roles but those with devices of their own."""
    trainer, scoring = config.trainer, config.reward_model if isinstance(config, Config) else None
    apart: tuple[Role, ...] = ("reward_model",) if scoring is not None and scoring.enable_resource_pool else ()
    roles = tuple(role for role in roles_of(config) if role not in apart)
    copied = {role: copies(config, role) for role in roles}
    pools = [Pool(trainer.nnodes, trainer.n_gpus_per_node, roles, copied, "trainer")]
    if scoring is not None and apart:
        pools.append(Pool(scoring.nnodes, scoring.n_gpus_per_node, apart, dict.fromkeys(apart, 1), "reward_model"))
    return pools


def processes(config: Config | SFTConfig) -> int:
    """Ranks and rollout workers that a run has at once."""
    ranks = sum(pool.ranks for pool in pools_of(config))
    return ranks + rollout_workers(config) if isinstance(config, Config) else ranks
