"""Checks of a config whose trajectories are live sessions: groups of one, begun before their prompt."""

from __future__ import annotations

from agentrl.config import Config
from agentrl.config.declaration import declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.errors import ConfigError

FITTING = ("reinforce_plus_plus", "rae", "gae", "decoupled_gae", "bi_level_gae")
"""Estimators of agentrl whose baseline needs no other trajectory of the prompt."""
TAKE = (
    "Take algorithm.adv_estimator=reinforce_plus_plus (rewards are compared with the batch's), rae (with a running "
    "mean) or gae (with a critic's values)"
)


def check_config(config: Config) -> None:
    """Raise ConfigError for the first key under which live sessions cannot be trained on."""
    rollout, estimator = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    declared = declaration_of(ADVANTAGE_ESTIMATORS.get(estimator))
    is_ours = ADVANTAGE_ESTIMATORS.is_built_in(estimator)
    if declared.compares_group or "greedy_rewards" in declared.columns or (is_ours and estimator not in FITTING):
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} compares the trajectories of a prompt, and a live client asks once. "
            f"{TAKE}"
        )
    if rollout.n != 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={rollout.n}: expected 1, as each session of a live client is a group of one"
        )
    if not config.async_training.max_staleness:
        raise ConfigError(
            "async_training.max_staleness=0: expected 1 or more, as live sessions are sampled before their step. The "
            "bound is how many updates a session may wait for its feedback"
        )
    if config.data.val_files is not None:
        raise ConfigError(
            "data.val_files: a validation of places for live sessions would wait for clients. Leave it out"
        )
    if config.uses_ray:
        raise ConfigError(
            "live clients talk to the process that trains, and under Ray others run trajectories: leave trainer.nnodes "
            "and trainer.n_gpus_per_node at 1, and rollout.nnodes at 0"
        )
    if rollout.roles:
        raise ConfigError("actor_rollout_ref.rollout.roles: a live session has no roles. Leave them out")
    if config.distillation.is_privileged:
        raise ConfigError("distillation: a privileged teacher reads columns of rows, and live sessions have no rows")
    if config.actor_rollout_ref.actor.router_replay.of_engine:
        raise ConfigError("actor.router_replay: the store of live sessions holds no experts of tokens. Turn it off")
    if config.algorithm.filter_groups.refill:
        raise ConfigError("algorithm.filter_groups.refill=true compares the trajectories of a prompt. Set it to false")
