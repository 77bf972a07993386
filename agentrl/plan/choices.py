"""Keys that a config leaves to the plan (`auto`), and the values that it chooses for a run on its device.

On a CPU these are the values that the keys would have without a plan, so results there do not depend on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TypeVar

from agentrl.config import Config, TuningConfig
from agentrl.config.section import Section
from agentrl.config.sections.model import ModelConfig, PolicyModelConfig
from agentrl.config.sections.parallel import MICRO_BATCH
from agentrl.config.sections.sft import PreferencesConfig
from agentrl.errors import ConfigError
from agentrl.model.compiled import TRIED, check_compiler
from agentrl.model.packed import plain_config
from agentrl.plan.memory import GB, MemoryPlan
from agentrl.workers.sft import section_of

ConfigT = TypeVar("ConfigT", bound=Config | TuningConfig)
SectionT = TypeVar("SectionT", bound=Section)
ROLES = "actor_rollout_ref."
RECOMPUTED, COMPILED = "model.enable_gradient_checkpointing", f"{ROLES}actor.use_torch_compile"
TOKENS = {
    f"{ROLES}actor.ppo_max_token_len_per_gpu": "update",
    "critic.ppo_max_token_len_per_gpu": "critic's update",
    f"{ROLES}rollout.log_prob_max_token_len_per_gpu": "log-probs",
    f"{ROLES}ref.log_prob_max_token_len_per_gpu": "log-probs",
}
"""Keys of micro-batches, and the moment of the plan whose memory grows with each."""
SIZES = (8192, 16384, 32768, 65536)
"""Tokens to choose from: at 1.5 billion parameters an H200 gained 4 and 5 % by the second and the third."""


def choose(config: ConfigT, device: str, room: float, note: Callable[[str], None]) -> ConfigT:
    """Return the config with a value in place of each `auto`; on a GPU `note` is called with each choice.

    room: bytes of the device.
    """
    whole = isinstance(config, Config)
    model = config.actor_rollout_ref.model if isinstance(config, Config) else config.model
    found: dict[str, object] = {}
    if isinstance(config, Config) and (left := [key for key in TOKENS if value_of(config, key) == "auto"]):
        found.update(dict.fromkeys(left, MICRO_BATCH))
        if device != "cpu":
            found.update(_tokens(MemoryPlan(config, device, room), left))
            note(", ".join(f"{key}={found[key]}" for key in left) + ": left to the plan (auto)")
        config = with_keys(config, found)
    if model.enable_gradient_checkpointing == "auto":
        key = f"{ROLES if whole else ''}{RECOMPUTED}"
        found[key] = False
        if device != "cpu":
            found[key], why = _recomputed(MemoryPlan(_planned(config), device, room))
            note(f"{key}=auto: {why}")
    if isinstance(config, Config) and config.actor_rollout_ref.actor.use_torch_compile == "auto":
        against = "on a CPU it does not pay" if device == "cpu" else _not_compiled(config, device)
        found[COMPILED] = against is None
        if device != "cpu":
            note(f"{COMPILED}=auto: {_COMPILING if against is None else f'false, as {against}'}")
    return with_keys(config, found)


_COMPILING = "true. The first log-probs and the first update compile layers, which may take a minute"


def _tokens(plan: MemoryPlan, keys: Sequence[str]) -> dict[str, object]:
    """Choose the largest micro-batches that fit, each in its moment.

    Where layers may be computed again as the plan chooses, none are: the smallest size comes before a recomputed layer.
    """
    if plan.config.actor_rollout_ref.actor.strategy not in ("fsdp", "fsdp2"):
        return {}
    found: dict[str, object] = {}
    try:
        for key in keys:
            fitting = [
                size for size in SIZES if _fits(plan.with_config(with_keys(plan.config, {key: size})), TOKENS[key])
            ]
            found[key] = max(fitting, default=SIZES[0])
    except ConfigError:
        return {}
    return found


def _fits(plan: MemoryPlan, name: str) -> bool:
    return all(moment.total <= plan.capacity for moment in plan.moments if moment.name == name)


def _recomputed(plan: MemoryPlan) -> tuple[bool | int, str]:
    """Choose the layers that are computed again, as few as fit: the key's value, and the choice in words."""
    if plan.config.actor_rollout_ref.actor.strategy not in ("fsdp", "fsdp2"):
        return False, "false, as the plan knows nothing of this strategy's memory"
    try:
        layers = plan.policy.layers
        # A key of 1 would mean true. All but the last take the least memory: all would keep one more input.
        counts = [0, *range(2, layers)]
        fewest = bisect_left(counts, True, key=lambda count: _recomputing(plan, count).updates_fit)
    except ConfigError as error:
        return False, f"false, as the plan does not know the model's memory: {error}"
    value: bool | int = True if fewest == len(counts) else counts[fewest] or False
    moments = _recomputing(plan, value).moments
    taken = max(moment.total for moment in moments if moment.name.endswith("update"))
    part = f"{'none' if value is False else 'all' if value is True else value} of the {layers} layers"
    return value, f"{part} computed again, with which updates take {taken / GB:.1f} of {plan.capacity / GB:.1f} GB"


def _recomputing(plan: MemoryPlan, value: bool | int) -> MemoryPlan:
    """Plan the same run with this value of the key."""
    return plan.with_config(with_keys(plan.config, {f"{ROLES}{RECOMPUTED}": value or False}))


def _not_compiled(config: Config, device: str) -> str | None:
    """Say why layers should not be compiled on a GPU; None where they should."""
    roles = config.actor_rollout_ref
    model, actor = roles.model, roles.actor
    if actor.strategy not in ("fsdp", "fsdp2"):
        return "a strategy of yours may not compile"
    if model.dtype != "bfloat16":
        return "what it gains was measured in bfloat16 alone"
    if any(one.tensor > 1 for one in (actor.parallel, roles.ref_parallel, config.critic.parallel)):
        return "layers whose matrices are split cannot be compiled"
    if actor.router_replay.mode != "disabled" or actor.has_router_losses:
        return "compiled routers can neither be steered nor read"
    try:
        for path in dict.fromkeys(filter(None, (model.path, roles.ref.path, config.critic.path))):
            override = model.override_config if path == model.path else {}
            kind = plain_config(path, model.trust_remote_code, override).model_type
            if kind not in TRIED:
                return f"models of the kind {kind} were not tried ({', '.join(TRIED)} were)"
        check_compiler(device)
    except ConfigError as error:
        return str(error).partition("\n")[0]
    return None


def value_of(section: Section, key: str) -> object:
    """Return the value of a key, a dotted path."""
    return reduce(getattr, key.split("."), section)


def with_keys(section: SectionT, keys: Mapping[str, object]) -> SectionT:
    """Copy a section with other values of the keys, dotted paths, unchecked."""
    changed: dict[str, object] = {name: value for name, value in keys.items() if "." not in name}
    for name in dict.fromkeys(key.partition(".")[0] for key in keys if "." in key):
        within = {key.removeprefix(f"{name}."): value for key, value in keys.items() if key.startswith(f"{name}.")}
        changed[name] = with_keys(getattr(section, name), within)
    return section.model_copy(update=changed)


def _planned(config: Config | TuningConfig) -> Config:
    """Write a training on files as a training whose engine is on other devices, for the plan of its updates."""
    if isinstance(config, Config):
        return config
    data, trainer = config.data, config.trainer
    keys: dict[str, object] = {
        "actor_rollout_ref.model": PolicyModelConfig().model_copy(
            update={name: getattr(config.model, name) for name in ModelConfig.model_fields}
        ),
        "actor_rollout_ref.actor": section_of(config),
        "actor_rollout_ref.rollout.n": 2 if isinstance(config, PreferencesConfig) else 1,
        "actor_rollout_ref.rollout.nnodes": 1,
        "data.train_batch_size": data.train_batch_size,
        "data.max_prompt_length": 0,
        "data.max_response_length": data.max_length,
        "trainer.nnodes": trainer.nnodes,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
    }
    return with_keys(Config(), keys)
