"""The roles that a config asks for, where they are placed, and their workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from agentrl.algorithms.declared import declared_by_estimator, declared_by_loss, needs_reference
from agentrl.config import Config, PreferencesConfig, SFTConfig, TuningConfig
from agentrl.config.declaration import Computed, Score
from agentrl.config.registries import CRITIC_BACKENDS, POLICY_BACKENDS
from agentrl.config.sections.parallel import most_tokens
from agentrl.runtime.executor import Executor, open_executor
from agentrl.runtime.placement import Pool, Role
from agentrl.system.reporter import Reporter
from agentrl.workers.critic import CriticWorker
from agentrl.workers.groups import (
    CriticGroup,
    PolicyGroup,
    PreferenceGroup,
    ReferenceGroup,
    RewardModelGroup,
    TeacherGroup,
    TuningGroup,
)
from agentrl.workers.policy import PolicyWorker
from agentrl.workers.preferences import PolicyPreferenceWorker, PreferenceWorker, RewardPairWorker
from agentrl.workers.reference import ReferenceWorker
from agentrl.workers.reward_model import RewardModelWorker
from agentrl.workers.sft import SupervisedWorker
from agentrl.workers.teacher import TeacherWorker


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a training, by role."""

    executor: Executor
    policy: PolicyGroup
    reference: ReferenceGroup | None
    critic: CriticGroup | None
    reward_model: RewardModelGroup | None
    teacher: TeacherGroup | None = None


def open_workers(config: Config, device: str, total_steps: int, reporter: Reporter | None = None) -> Workers:
    """Make the workers of a training: in this process, or under Ray, which must be up.

    reporter: shown what ranks under Ray load. Raises UserError.
    """
    policy = policy_role(config, device, total_steps)
    reference = reference_role(config, device)
    critic = critic_role(config, device, total_steps) if "values" in declared_by_estimator(config).columns else None
    scoring = reward_model_role(config, device) if config.reward_model.classifies else None
    teacher = teacher_role(config, device)
    roles = [role for role in (policy, reference, critic, scoring, teacher) if role is not None]
    executor = open_executor(pools_of(config, roles), device, on_ray=config.uses_ray, reporter=reporter)
    referring = None
    if needs_reference(config):
        own = None if reference is None else executor.ranks(reference)
        referring = ReferenceGroup(executor.ranks(policy) if own is None else own, own)
    return Workers(
        executor=executor,
        policy=PolicyGroup(
            executor.ranks(policy),
            computed_scores(config),
            records_experts=config.actor_rollout_ref.actor.router_replay.mode == "R2",
        ),
        reference=referring,
        critic=None if critic is None else CriticGroup(executor.ranks(critic)),
        reward_model=None if scoring is None else RewardModelGroup(executor.ranks(scoring)),
        teacher=teachers_of(config, executor, policy, teacher),
    )


def teachers_of(
    config: Config, executor: Executor, policy: Role[PolicyWorker], teacher: Role[TeacherWorker] | None
) -> TeacherGroup | None:
    """Join the policy as a teacher, where it is one, and the others; None without any."""
    teaches_itself = any(one.is_policy for _, one in config.distillation.teachers)
    if teacher is None and not teaches_itself:
        return None
    return TeacherGroup(
        None if teacher is None else executor.ranks(teacher), executor.ranks(policy) if teaches_itself else None
    )


def open_sft_workers(
    config: SFTConfig, device: str, total_steps: int, reporter: Reporter | None = None
) -> tuple[Executor, TuningGroup]:
    """Make the workers of supervised training, as `open_workers` does."""
    role = sft_role(config, device, total_steps)
    executor = open_alone(role, config, device, reporter)
    return executor, TuningGroup(executor.ranks(role))


def open_preference_workers(
    config: PreferencesConfig, device: str, total_steps: int, reporter: Reporter | None = None
) -> tuple[Executor, PreferenceGroup]:
    """Make the workers of training on preferences, likewise."""
    role = preference_role(config, device, total_steps)
    executor = open_alone(role, config, device, reporter)
    return executor, PreferenceGroup(executor.ranks(role))


def open_alone(role: Role[object], config: TuningConfig, device: str, reporter: Reporter | None = None) -> Executor:
    """Make the executor of a training with one role."""
    trainer = config.trainer
    pool = Pool(trainer.nnodes, trainer.n_gpus_per_node, (role,), "trainer")
    return open_executor([pool], device, on_ray=config.uses_ray, reporter=reporter)


def pools_of(config: Config, roles: Sequence[Role[object]]) -> list[Pool]:
    """Place roles: on the trainer's devices, the reward model on devices of its own where the config gives it some."""
    trainer, scoring = config.trainer, config.reward_model
    apart = tuple(role for role in roles if role.name == REWARD_MODEL and scoring.enable_resource_pool)
    together = tuple(role for role in roles if role not in apart)
    pools = [Pool(trainer.nnodes, trainer.n_gpus_per_node, together, "trainer")]
    if apart:
        pools.append(Pool(scoring.nnodes, scoring.n_gpus_per_node, apart, "reward_model"))
    return pools


def processes(config: Config | TuningConfig) -> int:
    """Count the ranks and rollout workers that a run has at once."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if isinstance(config, TuningConfig):
        return ranks
    scoring = config.reward_model
    if scoring.enable_resource_pool:
        ranks += scoring.nnodes * scoring.n_gpus_per_node
    return ranks + config.rollout_workers


def further_scores(config: Config) -> list[Score]:
    """List the scores that the estimator reads of the policy's distributions in addition to log-probs."""
    return declared_by_estimator(config).scores


def computed_scores(config: Config) -> list[Computed]:
    """List the scores that the log-prob pass gives in addition to log-probs: also the recorded and checked scores."""
    return ["entropy", "varentropy", *(score for score in further_scores(config) if score != "entropy")]


def needs_log_probs(config: Config) -> bool:
    """Say whether the policy before the update goes over the batch, for the loss or for the estimator."""
    needed = config.algorithm.rollout_correction.needs_pass or declared_by_loss(config).select is not None
    return needed or bool(further_scores(config))


def policy_is_reference(config: Config) -> bool:
    """Return true where the policy without its adapters is the model that the reference would load."""
    return config.actor_rollout_ref.model.lora_rank > 0 and config.actor_rollout_ref.ref.path is None


def policy_role(config: Config, device: str, total_steps: int) -> Role[PolicyWorker]:
    """The policy. Raises ConfigError for a strategy that there is not; making it raises ConfigError, too."""
    actor = config.actor_rollout_ref.actor
    POLICY_BACKENDS.get(actor.strategy)
    scores = computed_scores(config)
    make = partial(PolicyWorker, config, device=device, total_steps=total_steps, further_scores=scores)
    return Role("policy", make, actor.parallel.copies)


def reference_role(config: Config, device: str) -> Role[ReferenceWorker] | None:
    """The reference; None where it is not needed, or the policy has its weights. Making it raises ConfigError."""
    if not needs_reference(config) or policy_is_reference(config):
        return None
    roles = config.actor_rollout_ref
    make = partial(
        ReferenceWorker,
        roles.ref.path or roles.model.path,
        dtype=roles.model.dtype,
        device=device,
        temperature=roles.rollout.temperature,
        log_prob_max_tokens=most_tokens(roles.ref.log_prob_max_token_len_per_gpu),
        trust_remote_code=roles.model.trust_remote_code,
        override=roles.model.override_config if roles.ref.path in (None, roles.model.path) else {},
        parallel=roles.ref_parallel,
        param_offload=roles.actor.fsdp_config.param_offload,
        compiled=roles.actor.compiles,
    )
    return Role("reference", make, roles.ref_parallel.copies)


def teacher_role(config: Config, device: str) -> Role[TeacherWorker] | None:
    """The teachers; None without teachers other than the policy. Making it raises ConfigError."""
    if all(teacher.is_policy for _, teacher in config.distillation.teachers):
        return None
    roles = config.actor_rollout_ref
    make = partial(
        TeacherWorker,
        config.distillation,
        roles.model,
        device=device,
        temperature=roles.rollout.temperature,
        max_tokens=most_tokens(roles.rollout.log_prob_max_token_len_per_gpu),
        parallel=config.teacher_parallel,
        param_offload=roles.actor.fsdp_config.param_offload,
    )
    return Role("teacher", make, config.teacher_parallel.copies)


def critic_role(config: Config, device: str, total_steps: int) -> Role[CriticWorker]:
    """The critic. Raises ConfigError for a strategy that there is not; making it raises ConfigError, too."""
    CRITIC_BACKENDS.get(config.critic.strategy)
    make = partial(CriticWorker, config, device=device, total_steps=total_steps)
    return Role("critic", make, config.critic.parallel.copies)


REWARD_MODEL = "reward_model"


def reward_model_role(config: Config, device: str) -> Role[RewardModelWorker]:
    """The reward model. Making it raises ConfigError."""
    dtype = config.actor_rollout_ref.model.dtype
    return Role(REWARD_MODEL, partial(RewardModelWorker, config.reward_model, dtype=dtype, device=device))


def sft_role(config: SFTConfig, device: str, total_steps: int) -> Role[SupervisedWorker]:
    """The policy of supervised training. Making it raises ConfigError."""
    make = partial(SupervisedWorker, config, device=device, total_steps=total_steps)
    return Role("sft", make, config.parallel.copies)


def preference_role(config: PreferencesConfig, device: str, total_steps: int) -> Role[PreferenceWorker[object]]:
    """The model that learns from pairs. Making it raises ConfigError."""
    make: Callable[[], PreferenceWorker[object]] = partial(
        PolicyPreferenceWorker, config, device=device, total_steps=total_steps
    )
    if config.trains == "reward_model":
        make = partial(RewardPairWorker, config, device=device, total_steps=total_steps)
    return Role("preferences", make, config.parallel.copies)
