"""peft's LoRA configs as keys of agentrl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentrl.config.overrides import Value
from agentrl.errors import ConfigError
from agentrl.trl.arguments import MODEL

if TYPE_CHECKING:
    from peft import PeftConfig

PLAIN: Mapping[str, tuple[object, ...]] = {
    "lora_dropout": (0.0, 0),
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "init_lora_weights": (True,),
    "layers_to_transform": (None,),
    "layers_pattern": (None,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
}
"""Options of LoRA with the values that agentrl's adapters have."""


def adapter_keys(config: PeftConfig, model_type: str) -> dict[str, Value]:
    """Translate a LoraConfig. `model_type`: of the model's config. Raises ConfigError for what agentrl's LoRA lacks."""
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    if not isinstance(config, LoraConfig):
        raise ConfigError(
            f"peft_config: expected a LoraConfig, found {type(config).__name__}; other adapters are not here"
        )
    for name, values in PLAIN.items():
        if hasattr(config, name) and getattr(config, name) not in values:
            raise ConfigError(
                f"peft_config.{name}={getattr(config, name)!r}: agentrl's adapters have {name}={values[0]!r}: give that"
            )
    targets = config.target_modules
    if targets is None and model_type in USUAL:
        targets = list(USUAL[model_type])
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        raise ConfigError(
            f"peft_config.target_modules={targets!r}: give 'all-linear', or a list such as ['q_proj', 'v_proj']"
        )
    excluded = config.exclude_modules
    return {
        f"{MODEL}.lora_rank": config.r,
        f"{MODEL}.lora_alpha": config.lora_alpha,
        f"{MODEL}.target_modules": targets if isinstance(targets, str) else sorted(targets),
        f"{MODEL}.exclude_modules": excluded if isinstance(excluded, str | None) else sorted(excluded),
    }
