"""peft's LoRA configs as keys of agentrl."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from agentrl.config.overrides import Value
from agentrl.errors import ConfigError
from agentrl.trl.arguments import MODEL

if TYPE_CHECKING:
    from peft import PeftConfig

READ = ("r", "lora_alpha", "target_modules", "exclude_modules")
NAMES = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
)
"""Fields of a LoraConfig that change no adapter in training."""


def adapter_keys(config: PeftConfig, model_type: str) -> dict[str, Value]:
    """Translate a LoraConfig. `model_type`: of the model's config. Raises ConfigError for what agentrl's LoRA lacks."""
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    if not isinstance(config, LoraConfig):
        raise ConfigError(
            f"peft_config: expected a LoraConfig, found {type(config).__name__}; other adapters are not here"
        )
    plain = LoraConfig()
    for field in fields(config):
        value, default = (getattr(one, field.name, None) for one in (config, plain))
        if field.name not in (*READ, *NAMES) and value != default and (value or default):  # of [], {} and None any
            raise ConfigError(
                f"peft_config.{field.name}={value!r}: agentrl's adapters have {field.name}={default!r}: give that"
            )
    if not isinstance(config.r, int) or config.r < 1:
        raise ConfigError(f"peft_config.r={config.r!r}: expected a rank of 1 or more; without adapters leave it out")
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
