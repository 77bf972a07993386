"""Declarations of the algorithms that a config chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.config.declaration import Declaration, declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

if TYPE_CHECKING:
    from agentrl.config import Config


def declared_by_estimator(config: Config) -> Declaration:
    """Return the columns that the advantage estimator declares. Raises ConfigError when it cannot be loaded."""
    return declaration_of(ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator))


def declared_by_loss(config: Config) -> Declaration:
    """Return the columns that the policy loss declares. Raises ConfigError when it cannot be loaded."""
    return declaration_of(POLICY_LOSSES.get(config.actor_rollout_ref.actor.policy_loss.loss_mode))


def needs_reference(config: Config) -> bool:
    """Check whether KLs are measured against a reference, or the estimator or the loss reads its log-probs."""
    if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
        return True
    return any("ref_logprobs" in one.columns for one in (declared_by_estimator(config), declared_by_loss(config)))
