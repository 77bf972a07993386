"""The sections that running trajectories reads, in training and without it."""

from __future__ import annotations

from typing import Annotated

from agentrl.config.rules import OnlyWith
from agentrl.config.section import Section
from agentrl.config.sections.data import RowsConfig
from agentrl.config.sections.model import PlainModelConfig
from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.config.sections.rollout import RolloutConfig
from agentrl.config.sections.tools import ToolsConfig
from agentrl.config.sections.trainer import RAY, RayInitConfig, RolloutsTrainerConfig


class PolicyConfig(Section):
    """`actor_rollout_ref.*`, as far as running trajectories reads it."""

    model: PlainModelConfig = PlainModelConfig()
    rollout: RolloutConfig = RolloutConfig()


class RolloutsConfig(Section):
    """The sections that running trajectories reads."""

    data: RowsConfig = RowsConfig()
    actor_rollout_ref: PolicyConfig = PolicyConfig()
    reward_model: RewardConfig = RewardConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    tools: Annotated[
        ToolsConfig,
        OnlyWith(
            "actor_rollout_ref.rollout.multi_turn.tool_config_path",
            "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
        ),
    ] = ToolsConfig()
    trainer: RolloutsTrainerConfig = RolloutsTrainerConfig()
    ray_init: Annotated[RayInitConfig, RAY] = RayInitConfig()

    @property
    def rollout_workers(self) -> int:
        """Number of processes that run trajectories: with Ray one on each machine that generates."""
        return self.actor_rollout_ref.rollout.nnodes or 1

    @property
    def uses_ray(self) -> bool:
        """Say whether more than this process is asked for."""
        return self.actor_rollout_ref.rollout.nnodes > 0
