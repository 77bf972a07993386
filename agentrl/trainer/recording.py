"""The record of an update's results for a step's tokens, for the files of its trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from agentrl.config import Config
from agentrl.observe.report import Finding
from agentrl.rollouts.contract import training
from agentrl.rollouts.saving import Saving
from agentrl.trainer.observer import Step, StepObserver
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.update_record import RecordFile, write_updates
from agentrl.workers.roles import Workers


class Records(StepObserver):
    """Writes an update's numbers of each token, next to the trajectories that are recorded."""

    def __init__(self, config: Config, workers: Workers, timed: Callable[[str], AbstractContextManager[None]]) -> None:
        self.config, self.workers, self.timed = config, workers, timed
        self.saving = Saving(config)

    def on_published(self, step: Step) -> None:
        """Record the step, while the engine samples by the new weights; only the recorded tokens travel."""
        with self.timed("record"):
            different = self._record(step) if step.rollout.files else {}
            step.found.add_check("coverage", [Finding("coverage", text, uid) for uid, text in different.items()])

    def _record(self, step: Step) -> dict[str, str]:
        """Return by uid how trained tokens differ from recorded ones."""
        batch, task = step.batch, training(self.config, step.number)
        if step.updated:
            batch = self.workers.policy.of_update(batch, self.config.algorithm.rollout_correction)
        files, done = [], 0
        for path, count in step.rollout.files:
            numbers = {
                one.uid: number
                for number, one in enumerate(step.outlines[done : done + count], done)
                if self.saving.takes(task, one.group)
            }
            files.append(RecordFile(path.absolute(), numbers))
            done += count
        recorded = {number for file in files for number in file.numbers.values()}
        owners = batch.trajectory.tolist()
        chosen = batch.select([row for row, owner in enumerate(owners) if owner in recorded])
        return self.workers.executor.compute(recorded_columns, chosen, files)[1]


def recorded_columns(batch: RaggedBatch, files: Sequence[RecordFile]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Write the record of a batch [T], where its tokens are; returns (no columns, the result of `write_updates`)."""
    return {}, write_updates(batch, files)
