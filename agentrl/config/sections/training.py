"""The whole config of `python -m agentrl.train`."""

from __future__ import annotations

from agentrl.config.section import Section
from agentrl.config.sections.actor import ActorRolloutRefConfig, CriticConfig
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.config.sections.data import DataConfig
from agentrl.config.sections.reward import CustomRewardConfig, RewardModelConfig
from agentrl.config.sections.tools import ToolsConfig
from agentrl.config.sections.trainer import QuickstartConfig, RayInitConfig, TrainerConfig


class Config(Section):
    """The whole config of `python -m agentrl.train`."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    tools: ToolsConfig = ToolsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    ray_init: RayInitConfig = RayInitConfig()
    quickstart: QuickstartConfig = QuickstartConfig()
