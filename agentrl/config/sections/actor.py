"""Keys of policy, reference and critic: `actor_rollout_ref.*` and `critic.*`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.registries import ADVANTAGE_ESTIMATORS, CRITIC_BACKENDS, POLICY_BACKENDS, POLICY_LOSSES
from agentrl.config.rules import ConflictsWith, Names, OnlyWith, ReadBy
from agentrl.config.section import Finding, Section
from agentrl.config.sections.algorithm import KLLossType, LossAggMode, LossUnit, PolicyLossConfig
from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.parallel import MICRO_BATCH, RANKS, ActorFSDPConfig, FSDPConfig, MicroBatch, Parallel
from agentrl.config.sections.rollout import TrainingRolloutConfig
from agentrl.config.sections.rollouts import PolicyConfig
from agentrl.config.sections.trainer import CheckpointConfig


def clips(name: str) -> ReadBy:
    """Make the rule of one of the clip bounds."""
    return ReadBy(
        (POLICY_LOSSES,),
        "policy_loss.loss_mode=vanilla or gspo or cispo or dppo_tv or dppo_kl or geo_mean or clip_cov",
        declares=lambda declared: name in declared.keys,
    )


class RouterReplayConfig(Section):
    """`actor_rollout_ref.actor.router_replay.*`"""

    mode: Annotated[
        Literal["disabled", "R2", "R3"],
        ConflictsWith(
            "algorithm.rollout_correction.proximal=rollout or interpolated",
            of="R2",
            why="it replays the experts that the policy chose as its log-probs were computed, and then they are not. "
            "Set proximal=recomputed, or mode=R3",
        ),
        ConflictsWith(
            "actor_rollout_ref.rollout.name=sglang or vllm or mixed",
            of="R3",
            why="it needs an engine that tells which experts it chose, and agentrl does not ask servers for them. Set "
            "mode=R2, and bound what their routers change by algorithm.rollout_correction.rollout_is=token, or use "
            "actor_rollout_ref.rollout.name=embedded",
        ),
        ConflictsWith(
            "actor_rollout_ref.actor.use_torch_compile=true", of="R2 or R3", why="compiled routers cannot be steered"
        ),
    ] = "disabled"
    """In a mixture of experts, train each token through the experts that it was sent to before the update, while gate
    values stay the router's own. R2: those that the policy chose as its log-probs were computed; R3: those that the
    engine chose as it sampled (arXiv:2510.11370), with the embedded engine, or one of yours that tells them."""

    @property
    def of_engine(self) -> bool:
        """Say whether the engine records the experts that it chooses."""
        return self.mode == "R3"


class ActorConfig(Section):
    """`actor_rollout_ref.actor.*`"""

    strategy: Annotated[str, Names(POLICY_BACKENDS, options="strategy_options")] = "fsdp2"
    """Backend that holds, shards and steps the policy; fsdp means fsdp2."""
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    """Options of a backend of yours. With fsdp2 they weigh losses of a mixture's routers: moe_aux_loss_coeff, of the
    balance of experts, and moe_z_loss_coeff, of large logits (docs/models.md); all else has keys of its own."""
    ppo_mini_batch_size: int = Field(16, gt=0)
    """The most prompts of an optimizer step; a batch is split into mini-batches as evenly as whole prompts can be. Not
    given, it is the largest even size up to the default."""
    ppo_epochs: int = Field(1, gt=0)
    """Passes over each batch."""
    ppo_max_token_len_per_gpu: MicroBatch = MICRO_BATCH
    """Tokens a micro-batch and rank (with ulysses_sequence_parallel_size, ranks share one); changes memory, never the
    result. Tokens that transcripts of a session share count once where they are computed once (performance.md). auto:
    on a GPU the largest of 8192, 16384, 32768 and 65536 that fits by the plan, on a CPU the default."""
    clip_ratio: Annotated[
        float | None,
        clips("clip_ratio"),
        ConflictsWith(
            "clip_ratio_low",
            "clip_ratio_high",
            why="clip_ratio sets both bounds at once. Keep one kind, and set the other to null",
        ),
    ] = Field(None, gt=0)
    """Both clip bounds at once. With none of the three set: 0.2."""
    clip_ratio_low: Annotated[float | None, clips("clip_ratio_low")] = Field(None, gt=0)
    """The ratio is clipped from below at 1 - this; null: 0.2. With geo_mean it bounds the log-ratio, with dppo_tv and
    dppo_kl the divergence."""
    clip_ratio_high: Annotated[float | None, clips("clip_ratio_high")] = Field(None, gt=0)
    """The ratio is clipped from above at 1 + this; null: 0.2. With geo_mean, dppo_tv and dppo_kl likewise."""
    clip_ratio_c: Annotated[
        float,
        ReadBy(
            (POLICY_LOSSES,),
            "policy_loss.loss_mode=vanilla or dppo_tv or dppo_kl",
            declares=lambda declared: "clip_ratio_c" in declared.keys,
        ),
    ] = Field(3.0, gt=1)
    """Dual-clip bound for negative advantages (arXiv:1912.09729); with dppo_tv and dppo_kl the largest weight of a
    token, for which 20 is recommended."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How the loss by token becomes a number: its mean over all tokens (token-sum: their sum), or by loss_unit (the sum
    of its tokens, their mean, or their sum divided by data.max_response_length) and then the mean over units."""
    loss_unit: LossUnit = "trajectory"
    """The unit of each seq-mean-* of policy and critic. trajectory: all its policy tokens together, in however many
    transcripts, and with roles those of each role; transcript: a trajectory weighs by its number of transcripts."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss; with target_entropy its start."""
    target_entropy: Annotated[
        float | None,
        ConflictsWith(
            "algorithm.rollout_correction.proximal=published or rollout or interpolated",
            why="the entropy must be known before the update. Set proximal=recomputed",
        ),
    ] = Field(None, gt=0)
    """Give the bonus only while the entropy, nats a token, is at most this, with a weight that grows by 0.005 in each
    step below it and falls by as much above it (adaptive entropy control, arXiv:2505.22312); null: the weight stays."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference policy to the loss."""
    kl_loss_coef: Annotated[float, OnlyWith("use_kl_loss=true")] = Field(0.001, ge=0)
    """Weight of that KL divergence."""
    kl_loss_type: Annotated[KLLossType, OnlyWith("use_kl_loss=true")] = "low_var_kl"
    """Estimator of that KL divergence: k1 (kl), k2 (mse), k3 (low_var_kl), abs. k3 is bounded at 10, so
    it does not pull back a token more than 11 nats above the reference's log-prob, or 2.6 below. With a + (k1+, k3+
    ...) the value stays, and the gradient is that of k2, which is the divergence's and grows with the distance."""
    success_nll_coef: float = Field(0.0, ge=0)
    """Weight in the loss of the mean negative log-likelihood of the tokens of trajectories that succeed
    (reward_model.success_threshold): VAPO's positive-example loss (arXiv:2504.05118), with 0.1 there."""
    observation_nll_coef: float = Field(0.0, ge=0)
    """Weight in the loss of the mean negative log-likelihood of what the policy reads after its first token: answers of
    tools and environments, and the template around them (ECHO, arXiv:2605.24517)."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient; a larger one is scaled down."""
    shuffle: bool = True
    """Shuffle the prompts over the mini-batches."""
    freeze_vision_tower: bool = False
    """Train nothing of a vision-language model's vision tower, in the critic neither; adapters stay out of it, too."""
    use_torch_compile: Annotated[
        Literal["auto"] | bool,
        ConflictsWith(
            "fsdp_config.tensor_parallel_size above 1",
            "ref.fsdp_config.tensor_parallel_size above 1",
            "critic.model.fsdp_config.tensor_parallel_size above 1",
            of="true",
            why="layers whose matrices are split cannot be compiled. Use fsdp_size and ulysses_sequence_parallel_size",
        ),
    ] = "auto"
    """Compile the decoder layers of policy, reference and critic by torch.compile, in the first steps. auto: on a GPU,
    in bfloat16, models of families that were tried (docs/scale.md)."""
    ulysses_sequence_parallel_size: Annotated[int, RANKS] = Field(1, gt=0)
    """Ranks that split each micro-batch's tokens (arXiv:2309.14509); they exchange them for heads in attention."""
    router_replay: RouterReplayConfig = RouterReplayConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()
    fsdp_config: ActorFSDPConfig = ActorFSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def findings(self) -> Iterator[Finding]:
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            distance = getattr(self, name)
            if distance is not None and distance >= 1:
                bound = f"[{1 - distance:g}, ...]" if name == "clip_ratio_low" else f"[..., {1 + distance:g}]"
                yield Finding(
                    f"actor_rollout_ref.actor.{name}={distance:g} is the distance of the ratio's bound from 1, so that "
                    f"ratios are clipped to {bound}; for the bound {distance:g} set {abs(distance - 1):.3g}",
                    "remark",
                )

    @property
    def parallel(self) -> Parallel:
        """Arrangement of the ranks."""
        return Parallel.from_fsdp(self.ulysses_sequence_parallel_size, self.fsdp_config)

    @property
    def compiles(self) -> bool:
        """Say whether layers are compiled. With auto they are not, until the plan has chosen."""
        return self.use_torch_compile is True

    @property
    def has_router_losses(self) -> bool:
        """Say whether the options of fsdp2 add losses of a mixture's routers."""
        return any(self.strategy_options.get(name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"))

    @property
    def has_entropy_bonus(self) -> bool:
        """Say whether the loss has an entropy bonus, in some steps at least."""
        return self.entropy_coeff != 0 or self.target_entropy is not None

    @property
    def clip_low(self) -> float:
        """The lower clip bound that holds."""
        return self.clip_ratio_low or self.clip_ratio or 0.2

    @property
    def clip_high(self) -> float:
        """The upper clip bound that holds."""
        return self.clip_ratio_high or self.clip_ratio or 0.2


OWN_REFERENCE = OnlyWith(
    "actor_rollout_ref.model.lora_rank=0",
    "path",
    because="the policy without its adapters is the reference",
)


class RefConfig(Section):
    """`actor_rollout_ref.ref.*`"""

    path: str | None = None
    """Model of the reference policy; null: actor_rollout_ref.model.path."""
    log_prob_max_token_len_per_gpu: Annotated[MicroBatch, OWN_REFERENCE] = MICRO_BATCH
    """Tokens a micro-batch of the reference's log-prob pass; changes memory, never the result. auto: as the actor's."""
    ulysses_sequence_parallel_size: Annotated[int | None, OWN_REFERENCE, RANKS] = Field(None, gt=0)
    """null: the actor's."""
    fsdp_config: Annotated[FSDPConfig, OWN_REFERENCE] = FSDPConfig()


class ActorRolloutRefConfig(PolicyConfig):
    """`actor_rollout_ref.*`"""

    model: PolicyModelConfig = PolicyModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: TrainingRolloutConfig = TrainingRolloutConfig()
    ref: Annotated[
        RefConfig,
        ReadBy(
            (ADVANTAGE_ESTIMATORS, POLICY_LOSSES),
            "actor.use_kl_loss=true",
            "algorithm.use_kl_in_reward=true",
            "algorithm.adv_estimator=online_dpo",
            declares=lambda declared: "ref_logprobs" in declared.columns,
        ),
    ] = RefConfig()

    @property
    def ref_parallel(self) -> Parallel:
        """Arrangement of the reference's ranks."""
        sequence = self.ref.ulysses_sequence_parallel_size or self.actor.ulysses_sequence_parallel_size
        return Parallel.from_fsdp(sequence, self.ref.fsdp_config)


class CriticModelConfig(Section):
    """`critic.model.*`"""

    fsdp_config: FSDPConfig = FSDPConfig()


class CriticConfig(Section):
    """`critic.*`"""

    strategy: Annotated[str, Names(CRITIC_BACKENDS, options="strategy_options")] = "fsdp2"
    """Same as the actor's, for the critic."""
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    """Same as the actor's."""
    path: str | None = None
    """Model the critic starts from; null: the policy's start."""
    ppo_mini_batch_size: int | None = Field(None, gt=0)
    """null: the actor's."""
    ppo_epochs: int | None = Field(None, gt=0)
    """null: the actor's."""
    ppo_max_token_len_per_gpu: MicroBatch = MICRO_BATCH
    """Same as the actor's."""
    cliprange_value: float = Field(0.5, gt=0)
    """Values may move by so much from those before the update; the loss takes the worse of clipped and
    unclipped."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Same as the actor's; the unit is the actor's loss_unit."""
    grad_clip: float = Field(1.0, gt=0)
    """Same as the actor's."""
    ulysses_sequence_parallel_size: Annotated[int, RANKS] = Field(1, gt=0)
    """Same as the actor's."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    model: CriticModelConfig = CriticModelConfig()

    def over(self, actor: ActorConfig) -> ActorConfig:
        """Return the keys that the critic learns by: the actor's, with the critic's own in their place.

        A key that is null here stays the actor's.
        """
        found = {name: getattr(self, name) for name in ActorConfig.model_fields if name in CriticConfig.model_fields}
        own = {name: value for name, value in found.items() if value is not None}
        fsdp_config = actor.fsdp_config.model_copy(update=dict(self.model.fsdp_config))
        return actor.model_copy(update={**own, "fsdp_config": fsdp_config})

    @property
    def parallel(self) -> Parallel:
        """Arrangement of the ranks."""
        return Parallel.from_fsdp(self.ulysses_sequence_parallel_size, self.model.fsdp_config)
