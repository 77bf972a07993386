"""The config: keys, defaults and rules in `sections`, choices and recipes in `configs/`. Importable without torch."""

from agentrl.config.load import config_to_dict, load_config, write_config
from agentrl.config.sections.actor import ActorConfig, ActorRolloutRefConfig, CriticConfig, RefConfig
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.config.sections.data import DataConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.config.sections.rollout import AgentConfig, MultiTurnConfig, RolloutConfig, ValKwargs
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig, TuningConfig
from agentrl.config.sections.trainer import QuickstartConfig, TrainerConfig
from agentrl.config.sections.training import Config

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
    "PreferencesConfig",
    "QuickstartConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "SFTConfig",
    "TrainerConfig",
    "TuningConfig",
    "ValKwargs",
    "config_to_dict",
    "load_config",
    "write_config",
]
