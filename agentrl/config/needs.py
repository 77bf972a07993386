"""Keys that have an effect only with others: set where these are not, they are refused.

A key counts as set when the user gave it (command line or own YAML) another value than the default.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.section import Section
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import SFTConfig
from agentrl.config.sections.training import Config
from agentrl.errors import ConfigError

NEEDS_CRITIC = ("gae",)
GROUP_ESTIMATORS = ("grpo", "grpo_turn", "rloo", "opo")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

STARTED_SERVERS = (
    "num_servers",
    "tensor_model_parallel_size",
    "gpu_memory_utilization",
    "engine_kwargs.*",
    "free_cache_engine",
    "max_server_restarts",
)
"""Keys of the rollout that are about SGLang servers which are started, not attached to."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Keys (patterns) that have an effect only where `holds` is true of the config."""

    keys: tuple[str, ...]
    needs: str
    """What the user would have to set."""
    holds: Callable[[Any], bool]


def has_tools(config: Config) -> bool:
    return config.actor_rollout_ref.rollout.multi_turn.tool_config_path is not None


def has_tools_or_interactions(config: Config) -> bool:
    return has_tools(config) or config.actor_rollout_ref.rollout.multi_turn.interaction_config_path is not None


def uses_quickstart(config: Config) -> bool:
    return "quickstart" in (config.data.train_files, config.data.val_files, config.actor_rollout_ref.model.path)


def uses_ray(config: Config | SFTConfig) -> bool:
    """Whether more than this process is asked for."""
    if config.trainer.nnodes * config.trainer.n_gpus_per_node > 1:
        return True
    return isinstance(config, Config) and (
        config.actor_rollout_ref.rollout.nnodes > 0 or config.reward_model.enable_resource_pool
    )


def lora_needs(prefix: str, model: Callable[[Any], ModelConfig]) -> Needs:
    keys = tuple(f"{prefix}.{name}" for name in ("lora_alpha", "target_modules", "lora_adapter_path"))
    return Needs(keys, f"{prefix}.lora_rank above 0", lambda c: model(c).lora_rank > 0)


def activation_needs(prefix: str, model: Callable[[Any], ModelConfig]) -> tuple[Needs, ...]:
    key = (f"{prefix}.enable_activation_offload",)
    return (
        Needs(key, f"{prefix}.enable_gradient_checkpointing=true", lambda c: model(c).enable_gradient_checkpointing),
        Needs(key, "trainer.device=cuda", lambda c: c.trainer.device != "cpu"),
    )


NEEDS_SANDBOX_URL = Needs(
    tuple(f"reward_model.sandbox_fusion.{name}" for name in ("max_concurrent", "memory_limit_mb", "timeout")),
    "reward_model.sandbox_fusion.url",
    lambda c: c.reward_model.sandbox_fusion.url is not None,
)
NEEDS_JUDGE_URL = Needs(
    tuple(
        f"reward_model.judge.{name}"
        for name in (
            "model",
            "api_key_env",
            "data_sources",
            "prompt",
            "extra_body",
            "max_concurrent",
            "timeout",
        )
    ),
    "reward_model.judge.base_url",
    lambda c: c.reward_model.judge.base_url is not None,
)
NEEDS_NO_REWARD_PATH = Needs(
    ("reward_model.judge.base_url",),
    "custom_reward_function.path=null, as a function of your own scores everything",
    lambda c: c.custom_reward_function.path is None,
)
NEEDS_REWARD_PATH = Needs(
    ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
    "custom_reward_function.path",
    lambda c: c.custom_reward_function.path is not None,
)
NEEDS_DEVICE = Needs(("*.fsdp_config.param_offload",), "trainer.device=cuda", lambda c: c.trainer.device != "cpu")
NEEDS_RANKS = Needs(
    ("*ulysses_sequence_parallel_size", "*.fsdp_config.fsdp_size", "*.fsdp_config.tensor_parallel_size"),
    "trainer.nnodes or trainer.n_gpus_per_node above 1",
    lambda c: c.trainer.nnodes * c.trainer.n_gpus_per_node > 1,
)
NEEDS_RESUME_PATH = Needs(
    ("trainer.resume_from_path",),
    "trainer.resume_mode=resume_path",
    lambda c: c.trainer.resume_mode == "resume_path",
)

TRAIN_NEEDS = (
    *activation_needs("actor_rollout_ref.model", lambda c: c.actor_rollout_ref.model),
    NEEDS_DEVICE,
    lora_needs("actor_rollout_ref.model", lambda c: c.actor_rollout_ref.model),
    Needs(
        ("tools.*",),
        "actor_rollout_ref.rollout.multi_turn.tool_config_path or interaction_config_path",
        has_tools_or_interactions,
    ),
    Needs(
        ("ray_init.*", "trainer.max_worker_restarts"),
        f"trainer.nnodes or trainer.n_gpus_per_node above 1, {ROLLOUT}.nnodes above 0, or "
        "reward_model.enable_resource_pool=true",
        uses_ray,
    ),
    Needs(
        (f"{ROLLOUT}.n_gpus_per_node",), f"{ROLLOUT}.nnodes above 0", lambda c: c.actor_rollout_ref.rollout.nnodes > 0
    ),
    NEEDS_RANKS,
    Needs(("tools.cassette_path",), "tools.cassette=record or replay", lambda c: c.tools.cassette is not None),
    Needs(
        (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
        f"{ACTOR}.use_kl_loss=true",
        lambda c: c.actor_rollout_ref.actor.use_kl_loss,
    ),
    Needs(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
        "algorithm.use_kl_in_reward=true",
        lambda c: c.algorithm.use_kl_in_reward,
    ),
    Needs(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        "algorithm.kl_ctrl.type=adaptive",
        lambda c: c.algorithm.kl_ctrl.type == "adaptive",
    ),
    Needs(
        (
            "actor_rollout_ref.ref.path",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            "actor_rollout_ref.ref.fsdp_config.*",
        ),
        f"{ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true",
        lambda c: c.actor_rollout_ref.actor.use_kl_loss or c.algorithm.use_kl_in_reward,
    ),
    Needs(
        (
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            "actor_rollout_ref.ref.fsdp_config.*",
        ),
        "actor_rollout_ref.model.lora_rank=0 or actor_rollout_ref.ref.path, as the policy without its adapters is the "
        "reference",
        lambda c: c.actor_rollout_ref.model.lora_rank == 0 or c.actor_rollout_ref.ref.path is not None,
    ),
    Needs(
        ("critic.*", "trainer.critic_warmup", "algorithm.lam"),
        "algorithm.adv_estimator=gae",
        lambda c: c.algorithm.adv_estimator in NEEDS_CRITIC,
    ),
    Needs(
        ("algorithm.gamma",),
        "algorithm.adv_estimator=gae or reinforce_plus_plus",
        lambda c: c.algorithm.adv_estimator in (*NEEDS_CRITIC, "reinforce_plus_plus"),
    ),
    Needs(
        ("algorithm.norm_adv_by_std_in_grpo",),
        "algorithm.adv_estimator=grpo or grpo_turn",
        lambda c: c.algorithm.adv_estimator in ("grpo", "grpo_turn"),
    ),
    Needs(
        ("algorithm.filter_groups.enable",),
        f"algorithm.adv_estimator to be one of {', '.join(GROUP_ESTIMATORS)}",
        lambda c: c.algorithm.adv_estimator in GROUP_ESTIMATORS,
    ),
    Needs(
        (f"{ACTOR}.optim.adamw_lr",),
        f"{ACTOR}.optim.name=muon",
        lambda c: c.actor_rollout_ref.actor.optim.name == "muon",
    ),
    Needs(
        (f"{ACTOR}.optim.min_lr_ratio",),
        f"{ACTOR}.optim.lr_scheduler_type=cosine or linear",
        lambda c: c.actor_rollout_ref.actor.optim.lr_scheduler_type != "constant",
    ),
    Needs(("critic.optim.adamw_lr",), "critic.optim.name=muon", lambda c: c.critic.optim.name == "muon"),
    Needs(
        ("critic.optim.min_lr_ratio",),
        "critic.optim.lr_scheduler_type=cosine or linear",
        lambda c: c.critic.optim.lr_scheduler_type != "constant",
    ),
    NEEDS_RESUME_PATH,
    Needs(
        (f"{ROLLOUT}.val_kwargs.*", "data.val_batch_size", "data.val_max_samples", "trainer.test_freq"),
        "data.val_files",
        lambda c: c.data.val_files is not None,
    ),
    Needs(
        tuple(f"{ROLLOUT}.val_kwargs.{name}" for name in ("n", "temperature", "top_p", "top_k")),
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        lambda c: c.actor_rollout_ref.rollout.val_kwargs.do_sample,
    ),
    Needs(
        tuple(
            f"{ROLLOUT}.multi_turn.{name}"
            for name in ("max_tool_response_length", "tool_response_truncate_side", "max_parallel_calls")
        ),
        f"{ROLLOUT}.multi_turn.tool_config_path",
        has_tools,
    ),
    Needs(
        (f"{ROLLOUT}.multi_turn.max_user_turns",),
        f"{ROLLOUT}.multi_turn.interaction_config_path",
        lambda c: c.actor_rollout_ref.rollout.multi_turn.interaction_config_path is not None,
    ),
    Needs(
        (f"{ACTOR}.clip_ratio_c",),
        f"{ACTOR}.policy_loss.loss_mode=vanilla",
        lambda c: c.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla",
    ),
    Needs(
        (f"{ROLLOUT}.multi_turn.tool_timeout",),
        f"{ROLLOUT}.multi_turn.tool_config_path or interaction_config_path",
        has_tools_or_interactions,
    ),
    NEEDS_SANDBOX_URL,
    NEEDS_JUDGE_URL,
    NEEDS_NO_REWARD_PATH,
    NEEDS_REWARD_PATH,
    Needs(
        (
            "reward_model.model.*",
            "reward_model.max_length",
            "reward_model.forward_max_token_len_per_gpu",
            "reward_model.enable_resource_pool",
        ),
        "reward_model.enable=true",
        lambda c: c.reward_model.enable,
    ),
    Needs(
        ("reward_model.nnodes", "reward_model.n_gpus_per_node"),
        "reward_model.enable_resource_pool=true",
        lambda c: c.reward_model.enable_resource_pool,
    ),
    Needs(
        (
            *(f"{ROLLOUT}.{name}" for name in STARTED_SERVERS),
            f"{ROLLOUT}.server_urls",
            f"{ROLLOUT}.server_start_timeout",
            f"{ROLLOUT}.health_check_interval",
            f"{ROLLOUT}.update_weights_*",
        ),
        f"{ROLLOUT}.name=sglang",
        lambda c: c.actor_rollout_ref.rollout.name == "sglang",
    ),
    Needs(
        tuple(f"{ROLLOUT}.{name}" for name in STARTED_SERVERS),
        f"{ROLLOUT}.server_urls=null, as servers that run already have the arguments they were started with",
        lambda c: c.actor_rollout_ref.rollout.server_urls is None,
    ),
    Needs(
        (f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.gpu_memory_utilization"),
        "trainer.device=cuda",
        lambda c: c.trainer.device != "cpu",
    ),
    Needs(("quickstart.*",), "data.train_files=quickstart or model.path=quickstart", uses_quickstart),
    Needs(
        ("trainer.total_epochs",),
        "trainer.total_training_steps=null",
        lambda c: c.trainer.total_training_steps is None,
    ),
)

SFT_NEEDS = (
    *activation_needs("model", lambda c: c.model),
    NEEDS_DEVICE,
    NEEDS_RANKS,
    Needs(
        ("ray_init.*", "trainer.max_worker_restarts"),
        "trainer.nnodes or trainer.n_gpus_per_node above 1",
        uses_ray,
    ),
    NEEDS_RESUME_PATH,
    Needs(
        ("trainer.max_ckpt_to_keep", "trainer.checkpoint.async_save"),
        "trainer.save_freq above 0",
        lambda c: c.trainer.save_freq > 0,
    ),
    lora_needs("model", lambda c: c.model),
    Needs(("optim.adamw_lr",), "optim.name=muon", lambda c: c.optim.name == "muon"),
    Needs(
        ("optim.min_lr_ratio",),
        "optim.lr_scheduler_type=cosine or linear",
        lambda c: c.optim.lr_scheduler_type != "constant",
    ),
    Needs(("trainer.test_freq",), "data.val_files", lambda c: c.data.val_files is not None),
    Needs(
        ("trainer.total_epochs",),
        "trainer.total_training_steps=null",
        lambda c: c.trainer.total_training_steps is None,
    ),
)


NEEDS: dict[type[Section], tuple[Needs, ...]] = {
    Config: TRAIN_NEEDS,
    GenerateConfig: TRAIN_NEEDS,
    SFTConfig: SFT_NEEDS,
    EvaluateConfig: (NEEDS_SANDBOX_URL, NEEDS_JUDGE_URL, NEEDS_NO_REWARD_PATH, NEEDS_REWARD_PATH),
}


def refuse_ineffective(config: Section, user_set: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first key of `user_set` that can have no effect in `config`."""
    for rule in NEEDS[type(config)]:
        if rule.holds(config):
            continue
        for key, value in user_set.items():
            if any(fnmatch.fnmatchcase(key, pattern) for pattern in rule.keys):
                raise ConfigError(f"{key}={value} has no effect: it needs {rule.needs}. Set that, or leave {key} out")
