"""The watch `checks`: agentrl's own checks of updates, of trajectories, and of the engine's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from agentrl.checks.update import UpdateChecks
from agentrl.config.sections.training import Config
from agentrl.observe.watch import Learning, TrajectoryWatch, UpdateWatch, Watch

if TYPE_CHECKING:
    from agentrl.agent_loop import Scheduler
    from agentrl.config.sections.rollouts import RolloutsConfig
    from agentrl.engines.contract import RolloutEngine

Found = TypeVar("Found")


class Checks(Watch):
    """Checks each update, and in a training the trajectories, too."""

    def updates(self, learning: Learning[Found]) -> UpdateWatch[Found]:
        return UpdateChecks(learning)

    def trajectories(
        self, config: RolloutsConfig, scheduler: Scheduler, engine: RolloutEngine
    ) -> TrajectoryWatch | None:
        if not isinstance(config, Config):
            return None
        from agentrl.checks.trajectories import TrajectoryChecks  # late: a rank of workers runs no trajectories

        return TrajectoryChecks(config, scheduler, engine)
