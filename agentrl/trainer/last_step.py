"""The last step of a run in memory: trajectories, batch, metrics."""

from __future__ import annotations

from agentrl.system.metrics import Numbers
from agentrl.trainer.observer import Step, StepObserver
from agentrl.trajectory import Trajectory
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.parquet import read_trajectories


class LastStep(StepObserver):
    """Observer that keeps the newest step. Each step replaces the one before."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the step; 0 before the first."""
        self.trajectories: list[Trajectory] = []
        """The trajectories that the run recorded (`trainer.save_trajectories`), whole."""
        self.batch: RaggedBatch | None = None
        """The batch with its log-probs and advantages as columns; None where the step had nothing to train on."""
        self.metrics: Numbers = {}
        """The numbers that were logged."""

    def on_rollout(self, step: Step) -> None:
        self.number, self.batch, self.metrics = step.number, None, {}
        self.trajectories = [one for path, _ in step.rollout.files for one in read_trajectories(path)]

    def on_batch(self, step: Step) -> None:
        self.batch = step.batch.load()

    def on_end(self, step: Step) -> None:
        self.metrics = dict(step.metrics)
