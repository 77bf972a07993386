"""What one key cannot know: keys that conflict, that can have no effect with the others, that do not fit together.

A key counts as set when the user gave it (command line or own YAML) another value than the default.
"""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.offline import EvaluateConfig, GenerateConfig
from agentrl.config.parallel import Parallel
from agentrl.config.schema import Config, ModelConfig, RunConfig, SFTConfig
from agentrl.config.section import Section
from agentrl.errors import ConfigError
from agentrl.rollout.sglang.options import check_extra

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


def check(config: Section, user_set: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first key that conflicts, can have no effect, or does not fit with the others."""
    for rule in NEEDS[type(config)]:
        if not rule.holds(config):
            refuse_ineffective(rule, user_set)
    if isinstance(config, Config):
        check_clip(config)
        check_batches(config)
        check_rollout(config)
        check_servers(config)
        check_agent(config)
        check_tools(config)
        check_scorers(config)
        check_reward_model(config)
        if config.trainer.val_only and config.data.val_files is None:
            raise ConfigError("trainer.val_only=true needs data.val_files")
    if isinstance(config, Config | SFTConfig):
        check_trainer(config.trainer)
        check_parallel(config)
    if isinstance(config, GenerateConfig):
        check_generate(config)
    if isinstance(config, EvaluateConfig):
        check_evaluate(config)


def refuse_ineffective(rule: Needs, user_set: Mapping[str, Any]) -> None:
    for key, value in user_set.items():
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in rule.keys):
            raise ConfigError(f"{key}={value} has no effect: it needs {rule.needs}. Set that, or leave {key} out")


def check_clip(config: Config) -> None:
    actor = config.actor_rollout_ref.actor
    bounds = {"clip_ratio_low": actor.clip_ratio_low, "clip_ratio_high": actor.clip_ratio_high}
    given = [f"{ACTOR}.{name}={value}" for name, value in bounds.items() if value is not None]
    if actor.clip_ratio is not None and given:
        raise ConfigError(
            f"{ACTOR}.clip_ratio={actor.clip_ratio} conflicts with {' and '.join(given)}: clip_ratio sets both bounds "
            "at once. Keep one kind, and set the other to null"
        )


def check_batches(config: Config) -> None:
    batch = config.data.train_batch_size
    minis = {
        f"{ACTOR}.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        "critic.ppo_mini_batch_size": config.critic.ppo_mini_batch_size,
    }
    for key, size in minis.items():
        if size is not None and batch % size:
            divisors = [n for n in range(1, batch + 1) if batch % n == 0]
            near = [*[n for n in divisors if n < size][-1:], *[n for n in divisors if n > size][:1]]
            raise ConfigError(
                f"{key}={size} must divide data.train_batch_size={batch} (both count prompts); the nearest that do: "
                f"{' and '.join(map(str, near))}"
            )


def check_rollout(config: Config) -> None:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    needed = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        raise ConfigError(
            f"{ROLLOUT}.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length = {data.max_prompt_length} + {data.max_response_length} = {needed}; "
            "raise it, or set it to null"
        )
    if data.val_files is not None and not (rollout.val_kwargs.do_sample or rollout.val_kwargs.greedy):
        raise ConfigError(
            f"{ROLLOUT}.val_kwargs has do_sample=false and greedy=false, so nothing would be validated; set one of "
            "them, or data.val_files=null"
        )


def rollout_workers(config: Config) -> int:
    """Processes that run trajectories: with Ray one on each machine that generates."""
    return config.actor_rollout_ref.rollout.nnodes or config.trainer.nnodes


def check_servers(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.server_urls is not None and len(rollout.server_urls) < rollout_workers(config):
        raise ConfigError(
            f"{ROLLOUT}.server_urls has {len(rollout.server_urls)} servers for {rollout_workers(config)} rollout "
            f"workers, of which each needs one at least. Set {ROLLOUT}.nnodes=1, or name more servers"
        )
    check_extra(rollout.engine_kwargs.sglang)
    if rollout.name == "sglang" and rollout.server_urls is None and not is_installed("sglang"):
        raise ConfigError(
            f"{ROLLOUT}.name=sglang starts SGLang servers, and SGLang is not installed here. On a machine with a GPU: "
            "pip install 'agentrl[sglang]'; on a CPU: make setup-sglang. Or attach to servers that run already: "
            f"{ROLLOUT}.server_urls=[http://host:30000]"
        )


def is_installed(package: str) -> bool:
    """Looked up without an import. A mere folder of that name, without `__init__.py`, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_agent(config: Config) -> None:
    proxy = config.actor_rollout_ref.rollout.agent.openai_proxy
    if proxy.target is not None and proxy.command is not None:
        raise ConfigError(
            f"{ROLLOUT}.agent.openai_proxy.target={proxy.target} conflicts with "
            f"{ROLLOUT}.agent.openai_proxy.command={proxy.command}: both say what the agent is. Set one of them to null"
        )


def check_tools(config: Config) -> None:
    tools = config.tools
    if tools.cassette is not None and tools.cassette_path is None:
        raise ConfigError(f"tools.cassette={tools.cassette} needs tools.cassette_path, the file of the answers")
    workers = rollout_workers(config)
    if tools.cassette is not None and workers > 1:
        raise ConfigError(f"tools.cassette={tools.cassette} is one file, and there are {workers} rollout workers")


def check_scorers(config: Config | EvaluateConfig) -> None:
    reward = config.reward_model
    sandbox, judge = reward.sandbox_fusion, reward.judge
    for section, url, timeout in (
        ("sandbox_fusion", sandbox.url, sandbox.timeout),
        ("judge", judge.base_url, judge.timeout),
    ):
        if url is not None and timeout >= reward.timeout:
            raise ConfigError(
                f"reward_model.{section}.timeout={timeout:g} must be below reward_model.timeout={reward.timeout:g}, "
                "which counts its waiting, too"
            )
    if judge.base_url is not None and judge.model is None:
        raise ConfigError("reward_model.judge.base_url needs reward_model.judge.model, the name of the model there")


def check_reward_model(config: Config) -> None:
    if config.reward_model.enable and config.reward_model.model.path is None:
        raise ConfigError("reward_model.enable=true needs reward_model.model.path, a sequence classification model")


def check_trainer(trainer: RunConfig) -> None:
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path, the checkpoint's folder")


def check_parallel(config: Config | SFTConfig) -> None:
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if isinstance(config, SFTConfig):
        config.parallel.check(ranks, "", "model.fsdp_config")
        check_adapters(config.model, "model", config.parallel, "model.fsdp_config")
        return
    roles = config.actor_rollout_ref
    roles.actor.parallel.check(ranks, f"{ACTOR}.")
    roles.ref_parallel.check(ranks, "actor_rollout_ref.ref.")
    config.critic.parallel.check(ranks, "critic.", "model.fsdp_config")
    check_adapters(roles.model, "actor_rollout_ref.model", roles.actor.parallel, f"{ACTOR}.fsdp_config")
    tensor = max(role.tensor for role in (roles.actor.parallel, roles.ref_parallel, config.critic.parallel))
    if roles.actor.use_torch_compile and tensor > 1:
        raise ConfigError(
            f"{ACTOR}.use_torch_compile=true conflicts with fsdp_config.tensor_parallel_size={tensor}: layers whose "
            "matrices are split cannot be compiled. Use fsdp_size and ulysses_sequence_parallel_size"
        )


def check_adapters(model: ModelConfig, section: str, parallel: Parallel, fsdp_config: str) -> None:
    if model.lora_rank and parallel.tensor > 1:
        raise ConfigError(
            f"{fsdp_config}.tensor_parallel_size={parallel.tensor} conflicts with {section}.lora_rank="
            f"{model.lora_rank}: adapters are not split. Use fsdp_size and ulysses_sequence_parallel_size"
        )


def check_generate(config: GenerateConfig) -> None:
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    for name in ("nnodes", "n_gpus_per_node"):
        if getattr(config.trainer, name) > 1:
            raise ConfigError(f"trainer.{name} is for what is trained. Machines that generate: {ROLLOUT}.nnodes")
    if config.reward_model.enable_resource_pool:
        raise ConfigError("reward_model.enable_resource_pool=true: only training asks a reward model. Set it to false")
    if model.path == "quickstart":
        raise ConfigError("actor_rollout_ref.model.path must be given, e.g. model.path=runs/quickstart/policy")
    if not rollout.do_sample and rollout.n > 1:
        raise ConfigError(
            f"{ROLLOUT}.do_sample=false conflicts with {ROLLOUT}.n={rollout.n}: greedily every response of a prompt "
            "is the same. Set rollout.n=1"
        )
    if model.lora_adapter_path is not None:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_adapter_path={model.lora_adapter_path}: a whole model is wanted. Name one "
            "with its adapters merged, as runs write it into policy/, and set lora_adapter_path to null"
        )


def check_evaluate(config: EvaluateConfig) -> None:
    check_scorers(config)
    if config.ray_init.address is not None and config.ray_init.num_cpus is not None:
        raise ConfigError(
            f"ray_init.num_cpus={config.ray_init.num_cpus} conflicts with ray_init.address={config.ray_init.address}: "
            "a cluster that runs has its CPUs already. Set one of them to null"
        )
