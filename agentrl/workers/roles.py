"""The workers that a config asks for, by role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from agentrl.config import Config, SFTConfig
from agentrl.config.needs import NEEDS_CRITIC
from agentrl.config.sections.parallel import Parallel
from agentrl.runtime.group import WorkerGroup
from agentrl.workers.critic import CriticWorker
from agentrl.workers.policy import PolicyWorker
from agentrl.workers.reference import PolicyAsReference, ReferenceWorker
from agentrl.workers.reward_model import RewardModelWorker
from agentrl.workers.sft import SupervisedWorker

Role = Literal["policy", "reference", "critic", "reward_model", "sft"]
WORKERS: dict[Role, type] = {
    "policy": PolicyWorker,
    "reference": ReferenceWorker,
    "critic": CriticWorker,
    "reward_model": RewardModelWorker,
    "sft": SupervisedWorker,
}


def needs_reference(config: Config) -> bool:
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def policy_is_reference(config: Config) -> bool:
    """Without its adapters the policy is what the reference would load."""
    return config.actor_rollout_ref.model.lora_rank > 0 and config.actor_rollout_ref.ref.path is None


def roles_of(config: Config | SFTConfig) -> list[Role]:
    """The policy; the others only where the config needs them, and a model of their own."""
    if isinstance(config, SFTConfig):
        return ["sft"]
    roles: list[Role] = ["policy"]
    if needs_reference(config) and not policy_is_reference(config):
        roles.append("reference")
    if config.algorithm.adv_estimator in NEEDS_CRITIC:
        roles.append("critic")
    if config.reward_model.enable:
        roles.append("reward_model")
    return roles


def parallel_of(config: Config | SFTConfig, role: Role) -> Parallel:
    """How a role's ranks share its work."""
    if isinstance(config, SFTConfig):
        return config.parallel
    roles = config.actor_rollout_ref
    of: dict[Role, Parallel] = {
        "policy": roles.actor.parallel,
        "reference": roles.ref_parallel,
        "critic": config.critic.parallel,
        "reward_model": Parallel(),
    }
    return of[role]


def copies(config: Config | SFTConfig, role: Role) -> int:
    """How many neighbouring ranks of a role are given the same share of a batch and answer the same."""
    return parallel_of(config, role).copies


def reference_of(config: Config, groups: Mapping[Role, WorkerGroup]) -> WorkerGroup | None:
    """The group that gives the reference's log-probs; None where the algorithm needs none."""
    if needs_reference(config) and policy_is_reference(config):
        return PolicyAsReference(groups["policy"])
    return groups.get("reference")


def make_worker(role: Role, config: Config | SFTConfig, device: str, total_steps: int) -> Any:
    """The worker of a role, or this rank's part of it where a process group is up. Raises ConfigError."""
    if isinstance(config, SFTConfig):
        return SupervisedWorker(config, device=device, total_steps=total_steps)
    roles = config.actor_rollout_ref
    if role == "policy":
        return PolicyWorker(
            roles.model,
            roles.actor,
            device=device,
            temperature=roles.rollout.temperature,
            log_prob_max_tokens=roles.rollout.log_prob_max_token_len_per_gpu,
            total_steps=total_steps,
            critic_warmup=config.trainer.critic_warmup,
            seed=config.trainer.seed,
            max_response_length=config.data.max_response_length,
        )
    if role == "reference":
        return ReferenceWorker(
            roles.ref.path or roles.model.path,
            dtype=roles.model.dtype,
            device=device,
            temperature=roles.rollout.temperature,
            log_prob_max_tokens=roles.ref.log_prob_max_token_len_per_gpu,
            trust_remote_code=roles.model.trust_remote_code,
            parallel=roles.ref_parallel,
            param_offload=roles.actor.fsdp_config.param_offload,
            compiled=roles.actor.use_torch_compile,
        )
    if role == "reward_model":
        return RewardModelWorker(config.reward_model, dtype=roles.model.dtype, device=device)
    return CriticWorker(
        roles.model,
        config.critic,
        roles.actor,
        device=device,
        total_steps=total_steps,
        seed=config.trainer.seed,
        max_response_length=config.data.max_response_length,
    )
