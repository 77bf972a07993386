"""The config: keys and defaults in `schema`, values in the YAML files of `configs/`. Importable without torch."""

from agentrl.config.load import config_to_dict, load_config, write_config
from agentrl.config.rollout import AgentConfig, MultiTurnConfig, RolloutConfig, ValKwargs
from agentrl.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    Config,
    CriticConfig,
    CustomRewardConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    QuickstartConfig,
    RefConfig,
    RewardConfig,
    SFTConfig,
    TrainerConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "CustomRewardConfig",
    "DataConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "QuickstartConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "SFTConfig",
    "TrainerConfig",
    "ValKwargs",
    "config_to_dict",
    "load_config",
    "write_config",
]
