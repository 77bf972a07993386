"""Declarations of the algorithms that a config chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.config.columns import is_users
from agentrl.config.declaration import Declaration, declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.config.sections.algorithm import AlgorithmConfig


def declared_by_estimator(config: Config) -> Declaration:
    """Return the columns that the advantage estimator declares. Raises ConfigError when it cannot be loaded."""
    return declaration_of(ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator))


def declared_by_loss(config: Config) -> Declaration:
    """Return the columns that the policy loss declares. Raises ConfigError when it cannot be loaded."""
    return declaration_of(POLICY_LOSSES.get(config.actor_rollout_ref.actor.policy_loss.loss_mode))


def made_columns(config: Config) -> list[str]:
    """List the columns of a batch that are made from trajectories, for the estimator or for the loss."""
    declared = declared_by_estimator(config).columns | declared_by_loss(config).columns
    roles = ["role"] if config.actor_rollout_ref.rollout.roles else []
    return sorted(name for name in declared if name == "state" or is_users(name)) + roles


def leaves_out_equal_groups(config: AlgorithmConfig) -> bool:
    """Check whether the policy need not go over sequences whose advantages are all 0."""
    return config.filter_groups.enable and declaration_of(ADVANTAGE_ESTIMATORS.get(config.adv_estimator)).compares_group


def needs_reference(config: Config) -> bool:
    """Check whether KLs are measured against a reference, or the estimator or the loss reads its log-probs."""
    if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
        return True
    return any("ref_logprobs" in one.columns for one in (declared_by_estimator(config), declared_by_loss(config)))
