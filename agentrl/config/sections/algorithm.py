"""Keys of `algorithm.*`, and of the losses of policy and critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss.*`"""

    loss_mode: Literal["vanilla", "gspo"] = "vanilla"
    """vanilla: PPO's clipped ratio by token; gspo: by sequence (arXiv:2507.18071)."""


class KLCtrlConfig(Section):
    """`algorithm.kl_ctrl.*`: only with use_kl_in_reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0)
    horizon: int = Field(10000, gt=0)
    """adaptive only."""
    target_kl: float = Field(0.1, gt=0)
    """adaptive only."""


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups.*`"""

    enable: bool = True
    """Save the policy's update the work on sequences without advantage, as those of groups whose rewards are all equal.
    It changes no weight: mini-batches, denominators and the number of optimizer steps are those of the whole batch, and
    with KL loss or entropy bonus nothing is left out. No prompts are sampled anew in their place (DAPO). Group
    estimators only."""


class AlgorithmConfig(Section):
    """`algorithm.*`"""

    adv_estimator: Literal["grpo", "gae", "rloo", "reinforce_plus_plus", "opo", "grpo_turn"] = "grpo"
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = True
    """False: Dr. GRPO (arXiv:2503.20783)."""
    use_kl_in_reward: bool = False
    kl_penalty: KLType = "kl"
    """Only with use_kl_in_reward."""
    kl_ctrl: KLCtrlConfig = KLCtrlConfig()
    turn_reward_coef: float = Field(1.0, ge=0)
    """Weight of turn rewards (tools, interactions) beside the trajectory's score; 0 leaves them out."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
