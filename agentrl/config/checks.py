"""What one key cannot know: keys that conflict, or do not fit together."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from agentrl.config.choices import check_choices
from agentrl.config.needs import ACTOR, ROLLOUT, refuse_ineffective
from agentrl.config.section import Section
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.offline import EvaluateConfig, EvaluateRayConfig, GenerateConfig
from agentrl.config.sections.parallel import Parallel
from agentrl.config.sections.sft import SFTConfig
from agentrl.config.sections.trainer import RayInitConfig, RunConfig
from agentrl.config.sections.training import Config
from agentrl.config.sglang_arguments import check_extra
from agentrl.errors import ConfigError


def check(config: Section, user_set: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first key that conflicts, can have no effect, or does not fit with the others."""
    refuse_ineffective(config, user_set)
    check_choices(config)
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
    if isinstance(config, Config | SFTConfig | EvaluateConfig):
        check_ray(config.ray_init)
    if isinstance(config, GenerateConfig):
        check_generate(config)
    if isinstance(config, EvaluateConfig):
        check_evaluate(config)


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
                "within which the server has to answer"
            )
    if judge.base_url is not None and judge.model is None:
        raise ConfigError("reward_model.judge.base_url needs reward_model.judge.model, the name of the model there")


def check_reward_model(config: Config) -> None:
    if config.reward_model.enable and config.reward_model.model.path is None:
        raise ConfigError("reward_model.enable=true needs reward_model.model.path, a sequence classification model")


def check_trainer(trainer: RunConfig) -> None:
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path, the checkpoint's folder")


def check_ray(ray_init: RayInitConfig | EvaluateRayConfig) -> None:
    if ray_init.address is not None and ray_init.num_cpus is not None:
        raise ConfigError(
            f"ray_init.num_cpus={ray_init.num_cpus} conflicts with ray_init.address={ray_init.address}: "
            "a cluster that runs has its CPUs already. Set one of them to null"
        )


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
