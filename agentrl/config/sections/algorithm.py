"""Keys of `algorithm.*`, and of the losses of policy and critic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from agentrl.config.registries import ADVANTAGE_ESTIMATORS, GROUP_FILTERS, POLICY_LOSSES
from agentrl.config.rules import ConflictsWith, Names, Needs, OnlyWith, ReadBy
from agentrl.config.section import Finding, Section

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LossUnit = Literal["trajectory", "transcript"]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLLossType = Literal[KLType, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss.*`"""

    loss_mode: Annotated[str, Names(POLICY_LOSSES, options="options")] = "vanilla"
    """vanilla: PPO's clipped ratio by token; gspo: by sequence (arXiv:2507.18071). docs/algorithms.md compares all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a loss that takes some: sapo, dro (which needs dro_beta), clip_cov, kl_cov, m2po, or one of yours."""


class KLCtrlConfig(Section):
    """`algorithm.kl_ctrl.*`"""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: kl_coef as it is; adaptive: steered towards target_kl."""
    kl_coef: float = Field(0.001, ge=0)
    """Weight of the KL divergence in the reward; with type=adaptive its start."""
    horizon: Annotated[int, OnlyWith("type=adaptive")] = Field(10000, gt=0)
    """adaptive: each step multiplies kl_coef by 1 + clip(kl / target_kl - 1, -0.2, 0.2) * trajectories / horizon
    (arXiv:1909.08593)."""
    target_kl: Annotated[float, OnlyWith("type=adaptive")] = Field(0.1, gt=0)
    """KL divergence that the adaptive coefficient aims at: nats a token, the mean over trajectories."""


REFILL = OnlyWith("algorithm.filter_groups.refill=true")


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups.*`"""

    enable: Annotated[
        bool,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "algorithm.adv_estimator=grpo or grpo_turn or grpo_passk or rloo or opo or gpg or maxrl or online_dpo "
            "or rlsd",
            declares=lambda declared: declared.compares_group,
        ),
    ] = True
    """Skip the policy's update on sequences without advantage, such as groups whose rewards are all equal.
    It changes no weight: mini-batches, denominators and the number of optimizer steps are those of the whole batch, and
    with KL loss or entropy bonus nothing is left out. `refill` samples other prompts in their place."""
    refill: Annotated[
        bool, Needs("actor_rollout_ref.rollout.n above 1", "16 say: it compares the trajectories of a prompt")
    ] = False
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a step draws generation batches of prompts until
    data.train_batch_size of them teach by `rule`, and trains on these, the first ones drawn. What is left over is
    dropped."""
    rule: Annotated[str, REFILL, Names(GROUP_FILTERS, options="options")] = "differ"
    """Rule by which `refill` chooses the prompts that teach, of those with two trajectories or more that can be trained
    on. differ: their trajectories differ in `metric`."""
    options: Annotated[dict[str, Any], REFILL] = Field(default_factory=dict)
    """Options of a rule of yours that takes some."""
    metric: Annotated[str, REFILL] = "reward"
    """Number by which `refill` compares the trajectories of a prompt: reward, all that they are trained on but the KL;
    score, the scorer's alone; or one that the scorer gives beside it, e.g. acc (where it gives no acc, the score)."""
    max_num_gen_batches: Annotated[int, REFILL] = Field(10, ge=0)
    """Generation batches that `refill` may draw in a step before the run ends with an error; 0: no limit."""


Criterion = Literal[
    "token",
    "sequence",
    "geometric",
    "veto",
    "token_k2",
    "token_k3",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""Criteria of rejection; see `agentrl.algorithms.rollout_correction.kept`."""
RATIOS = ("token", "sequence", "geometric")
"""The criteria with a lower and an upper bound."""
WEIGHED = OnlyWith("rollout_is=tempered or token or sequence or geometric")
MEAN_UNKNOWN = "the mean over the batch must be known before the update. Set proximal=recomputed"
OF_STALE_TOKENS = "tempered"
"""The weight of stale tokens where the user chose none."""


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction.*`"""

    proximal: Annotated[
        Literal["recomputed", "published", "rollout", "interpolated"],
        Needs(
            "async_training.publish_every above 1",
            "otherwise the published policy is the one before the update. Set proximal=recomputed",
            of="published",
        ),
        Needs("async_training.max_staleness above 0", "which weights are published for", of="published"),
    ] = "recomputed"
    """The policy that the loss's ratio is taken to. recomputed: the one before the update, by a pass over the batch;
    published: the one that was last published (async_training.publish_every above 1), likewise; rollout: the one that
    sampled, by the engine's log-probs, without that pass; interpolated: between that one and the policy that is
    trained, the nearer to the latter the older a token is, without that pass."""
    rollout_is: Annotated[
        Literal["tempered", "token", "sequence", "geometric"] | None,
        ConflictsWith("proximal=rollout or interpolated", of="tempered", why=MEAN_UNKNOWN),
    ] = None
    """Weigh each token's loss by its importance, the ratio of the proximal policy to the engine (with proximal=rollout,
    of the policy that is trained): of the token; of all policy tokens of its sequence; or their geometric mean.
    tempered: of the token times that of its sequence's other tokens to a power, the largest up to 1 that leaves an
    effective sample size of 0.9, divided by the mean over the batch; with proximal=recomputed or published. null: no
    weights; with async_training.max_staleness above 0 it is tempered where none of rollout_is, proximal and reject is
    given."""
    rollout_is_threshold: Annotated[float, WEIGHED] = Field(2.0, gt=0)
    """Upper bound of the weights."""
    rollout_is_lower: Annotated[float | None, WEIGHED] = Field(None, gt=0)
    """Lower bound of the weights."""
    rollout_is_outside: Annotated[Literal["truncate", "mask"], WEIGHED] = "truncate"
    """Treatment of a weight out of bounds. truncate: the bound (TIS); mask: 0 (IcePop, arXiv:2510.18855)."""
    rollout_is_batch_normalize: Annotated[
        bool,
        OnlyWith("rollout_is=token or sequence or geometric"),
        ConflictsWith("proximal=rollout or interpolated", why=MEAN_UNKNOWN),
    ] = False
    """Divide the weights by their mean over the batch (by sequence: over sequences)."""
    reject: dict[Criterion, float | tuple[float, float]] = Field(default_factory=dict)
    """Bounds; tokens outside weigh 0 in the loss, and stay in its denominators. token=[0.5,2], sequence and geometric:
    of the ratio, as of rollout_is; veto=1e-4: the least ratio that no token of a sequence may be under. token_k3=0.01,
    seq_mean_k3, seq_sum_k3, seq_max_k3 and likewise k2: the most of (log ratio)^2 / 2 (k2), or ratio - 1 - log ratio
    (k3), of the token, or over the sequence."""
    gap_alarm: float | None = Field(0.01, gt=0)
    """Warn when the policy and the engine differ by more than this KL divergence, nats a token, and again each time it
    has doubled; null: never."""

    @field_validator("reject", mode="after")
    @classmethod
    def _has_bounds(
        cls, reject: dict[Criterion, float | tuple[float, float]]
    ) -> dict[Criterion, float | tuple[float, float]]:
        for name, bounds in reject.items():
            if name in RATIOS:
                if not (isinstance(bounds, tuple) and 0 < bounds[0] <= bounds[1]):
                    raise ValueError(f"{name} expects [lower, upper] bounds of a ratio, as in [0.5,2], found {bounds}")
            elif isinstance(bounds, tuple) or bounds <= 0:
                raise ValueError(f"{name} expects one number above 0, found {bounds}")
        return reject

    def findings(self) -> Iterator[Finding]:
        if self.rollout_is_lower is not None and self.rollout_is_lower > self.rollout_is_threshold:
            yield Finding(
                f"algorithm.rollout_correction.rollout_is_lower={self.rollout_is_lower:g} is above "
                f"rollout_is_threshold={self.rollout_is_threshold:g}; they are the bounds of the weights"
            )

    @property
    def needs_pass(self) -> bool:
        """Say whether a pass over the batch gives the proximal policy's log-probs."""
        return self.proximal in ("recomputed", "published")

    @property
    def normalizes(self) -> bool:
        """Say whether weights are divided by their mean over the batch."""
        return self.rollout_is_batch_normalize or self.rollout_is == "tempered"

    @property
    def changes_loss(self) -> bool:
        """Say whether tokens are weighed or rejected."""
        return self.rollout_is is not None or bool(self.reject)

    def text(self) -> str:
        """Write what is on, as the keys say it; "none" where nothing is."""
        on = [] if self.proximal == "recomputed" else [f"proximal={self.proximal}"]
        if self.rollout_is is not None:
            lower = "" if self.rollout_is_lower is None else f"{self.rollout_is_lower:g} to "
            on.append(
                f"rollout_is={self.rollout_is} ({self.rollout_is_outside} at {lower}{self.rollout_is_threshold:g})"
            )
        on += [f"reject.{name}={bounds}" for name, bounds in self.reject.items()]
        return ", ".join(on) or "none"


class AlgorithmConfig(Section):
    """`algorithm.*`"""

    adv_estimator: Annotated[
        str,
        Names(ADVANTAGE_ESTIMATORS, options="adv_options"),
        Needs("actor_rollout_ref.rollout.n above 1", "whose trajectories it compares", of="online_dpo"),
    ] = "grpo"
    """Estimator of the advantages; docs/algorithms.md compares all."""
    adv_options: dict[str, Any] = Field(default_factory=dict)
    """Options of an estimator that takes some: gigpo, gdpo, bi_level_gae, decoupled_gae, online_dpo, rlsd,
    optimal_token_baseline, or one of yours."""
    gamma: Annotated[
        float,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "adv_estimator=gae or bi_level_gae or decoupled_gae or reinforce_plus_plus",
            declares=lambda declared: "gamma" in declared.keys,
        ),
    ] = Field(1.0, ge=0, le=1)
    """Discount of the rewards of later tokens."""
    lam: Annotated[
        float,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "adv_estimator=gae or bi_level_gae",
            declares=lambda declared: "lam" in declared.keys,
        ),
    ] = Field(1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation (arXiv:1506.02438)."""
    norm_adv_by_std_in_grpo: Annotated[
        bool,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "adv_estimator=grpo or grpo_turn or grpo_passk or gigpo or gdpo or rlsd",
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
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    masked_statuses: list[Literal["length", "turn_limit", "malformed", "aborted"]] = []
    """Endings whose trajectories no loss goes over and no denominator counts, the critic's neither: [length] is
    DAPO's overlong filtering (arXiv:2503.14476, section 3.4). Their rewards count in the advantages of the others."""
