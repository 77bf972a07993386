"""Keys that a config leaves to the plan (`auto`), and the values that it chooses for a run on its device.

On a CPU these are the values that the keys would have without a plan, so results there do not depend on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

from agentrl.config import Config, TuningConfig
from agentrl.config.sections.model import ModelConfig, PolicyModelConfig
from agentrl.config.sections.sft import PreferencesConfig
from agentrl.errors import ConfigError
from agentrl.plan.memory import GB, MemoryPlan
from agentrl.workers.sft import section_of

ConfigT = TypeVar("ConfigT", bound=Config | TuningConfig)


def choose(config: ConfigT, device: str, room: float, note: Callable[[str], None]) -> ConfigT:
    """Return the config with a value in place of each `auto`; on a GPU `note` is called with each choice.

    room: bytes of the device.
    """
    model = config.actor_rollout_ref.model if isinstance(config, Config) else config.model
    if model.enable_gradient_checkpointing != "auto":
        return config
    chosen: bool | int = False
    if device != "cpu":
        key = f"{'actor_rollout_ref.' if isinstance(config, Config) else ''}model.enable_gradient_checkpointing"
        chosen, why = _recomputed(MemoryPlan(_planned(config), device, room))
        note(f"{key}=auto: {why}")
    return _with_model(config, {"enable_gradient_checkpointing": chosen})


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
    return plan.with_config(_with_model(plan.config, {"enable_gradient_checkpointing": value or False}))


def _with_model(config: ConfigT, keys: dict[str, object]) -> ConfigT:
    """Change keys of the model that learns."""
    if isinstance(config, Config):
        roles = config.actor_rollout_ref
        changed = roles.model_copy(update={"model": roles.model.model_copy(update=keys)})
        return config.model_copy(update={"actor_rollout_ref": changed})
    return config.model_copy(update={"model": config.model.model_copy(update=keys)})


def _planned(config: Config | TuningConfig) -> Config:
    """Write a training on files as a training whose engine is on other devices, for the plan of its updates."""
    if isinstance(config, Config):
        return config
    whole, data, trainer = Config(), config.data, config.trainer
    roles = whole.actor_rollout_ref
    pairs = isinstance(config, PreferencesConfig)
    rollout = roles.rollout.model_copy(update={"n": 2 if pairs else 1, "nnodes": 1})
    lengths = {"max_prompt_length": 0, "max_response_length": data.max_length}
    ranks = {"nnodes": trainer.nnodes, "n_gpus_per_node": trainer.n_gpus_per_node}
    model = PolicyModelConfig().model_copy(
        update={name: getattr(config.model, name) for name in ModelConfig.model_fields}
    )
    return whole.model_copy(
        update={
            "actor_rollout_ref": roles.model_copy(
                update={"model": model, "actor": section_of(config), "rollout": rollout}
            ),
            "data": whole.data.model_copy(update={"train_batch_size": data.train_batch_size, **lengths}),
            "trainer": whole.trainer.model_copy(update=ranks),
        }
    )
