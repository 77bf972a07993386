"""Keys of `algorithm.*`, and of the losses of policy and critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from agentrl.config.rules import Names, OnlyWith, ReadBy
from agentrl.config.section import Section

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLLossType = Literal[KLType, "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss.*`"""

    loss_mode: Annotated[str, Names(POLICY_LOSSES, options="options")] = "vanilla"
    """vanilla: PPO's clipped ratio by token; gspo: by sequence (arXiv:2507.18071). docs/algorithms.md compares all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a loss that takes some: sapo, dro, or one of yours."""


class KLCtrlConfig(Section):
    """`algorithm.kl_ctrl.*`"""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: kl_coef as it is; adaptive: steered towards target_kl."""
    kl_coef: float = Field(0.001, ge=0)
    """Weight of the KL divergence in the reward; with type=adaptive its start."""
    horizon: Annotated[int, OnlyWith("type=adaptive")] = Field(10000, gt=0)
    """adaptive: each step multiplies kl_coef by 1 + clip(kl / target_kl - 1, -0.2, 0.2) * sequences / horizon
    (arXiv:1909.08593)."""
    target_kl: Annotated[float, OnlyWith("type=adaptive")] = Field(0.1, gt=0)
    """KL divergence of a sequence that the adaptive coefficient aims at."""


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups.*`"""

    enable: Annotated[
        bool,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "algorithm.adv_estimator=grpo or grpo_turn or grpo_passk or rloo or opo or gpg or maxrl",
            declares=lambda declared: declared.compares_group,
        ),
    ] = True
    """Skip the policy's update on sequences without advantage, such as groups whose rewards are all equal.
    It changes no weight: mini-batches, denominators and the number of optimizer steps are those of the whole batch, and
    with KL loss or entropy bonus nothing is left out. No prompts are sampled anew in their place (DAPO)."""


class AlgorithmConfig(Section):
    """`algorithm.*`"""

    adv_estimator: Annotated[str, Names(ADVANTAGE_ESTIMATORS, options="adv_options")] = "grpo"
    """Estimator of the advantages; docs/algorithms.md compares all."""
    adv_options: dict[str, Any] = Field(default_factory=dict)
    """Options of an estimator that takes some: gigpo, optimal_token_baseline, or one of yours."""
    gamma: Annotated[
        float,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "adv_estimator=gae or reinforce_plus_plus",
            declares=lambda declared: "gamma" in declared.keys,
        ),
    ] = Field(1.0, ge=0, le=1)
    """Discount of the rewards of later tokens."""
    lam: Annotated[
        float, ReadBy((ADVANTAGE_ESTIMATORS,), "adv_estimator=gae", declares=lambda declared: "lam" in declared.keys)
    ] = Field(1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation (arXiv:1506.02438)."""
    norm_adv_by_std_in_grpo: Annotated[
        bool,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "adv_estimator=grpo or grpo_turn or grpo_passk or gigpo",
            declares=lambda declared: "norm_adv_by_std_in_grpo" in declared.keys,
        ),
    ] = True
    """Divide by the group's standard deviation; false: Dr. GRPO (arXiv:2503.20783)."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference policy from the rewards of the tokens."""
    kl_penalty: Annotated[KLType, OnlyWith("use_kl_in_reward=true")] = "kl"
    """Estimator of the KL divergence."""
    kl_ctrl: Annotated[KLCtrlConfig, OnlyWith("use_kl_in_reward=true")] = KLCtrlConfig()
    turn_reward_coef: float = Field(1.0, ge=0)
    """Weight of turn rewards (tools, interactions) beside the trajectory's score; 0 leaves them out."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
