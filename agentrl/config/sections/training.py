"""The whole config of `python -m agentrl.train`."""

from __future__ import annotations

from typing import Annotated

from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.config.rules import OnlyWith, ReadBy
from agentrl.config.sections.actor import ActorRolloutRefConfig, CriticConfig
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.config.sections.async_training import AsyncTrainingConfig
from agentrl.config.sections.data import DataConfig
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.config.sections.expert import ExpertConfig
from agentrl.config.sections.parallel import Parallel
from agentrl.config.sections.reward import RewardModelConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.trainer import QuickstartConfig, TrainerConfig


class Config(RolloutsConfig):
    """The whole config of `python -m agentrl.train`."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: Annotated[
        CriticConfig,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "algorithm.adv_estimator=gae or bi_level_gae or decoupled_gae",
            declares=lambda declared: "values" in declared.columns,
            off=("fsdp", "fsdp2"),  # verl's scripts name the strategy of every role, with GRPO too
        ),
    ] = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    distillation: DistillationConfig = DistillationConfig()
    expert: ExpertConfig = ExpertConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    trainer: TrainerConfig = TrainerConfig()
    quickstart: Annotated[
        QuickstartConfig,
        OnlyWith("data.train_files=quickstart", "data.val_files=quickstart", "actor_rollout_ref.model.path=quickstart"),
    ] = QuickstartConfig()

    @property
    def rollout_workers(self) -> int:
        """Number of processes that run trajectories: with Ray one on each machine that generates."""
        return self.actor_rollout_ref.rollout.nnodes or self.trainer.nnodes

    @property
    def prompts_per_draw(self) -> int:
        """Number of prompts that a step brings, or a whole multiple of it where it may draw again."""
        return self.data.train_batch_size if self.async_training.max_staleness else self.data.draw_size

    @property
    def teacher_parallel(self) -> Parallel:
        """Arrangement of the teachers' ranks."""
        own = self.distillation.ulysses_sequence_parallel_size
        sequence = own or self.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        return Parallel.from_fsdp(sequence, self.distillation.fsdp_config)

    @property
    def uses_ray(self) -> bool:
        """Say whether more than this process is asked for."""
        devices = self.trainer.nnodes * self.trainer.n_gpus_per_node
        return devices > 1 or self.actor_rollout_ref.rollout.nnodes > 0 or self.reward_model.enable_resource_pool
