"""The record of an update's results for a step's tokens, for the files of its trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.config import Config
from agentrl.rollouts.contract import Rollout, training
from agentrl.rollouts.saving import Saving
from agentrl.runtime.executor import Executor
from agentrl.trajectory import Outline
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.trajectory.update_record import RecordFile, write_updates


def record_update(
    config: Config,
    executor: Executor,
    step: int,
    batch: Sequences,
    owners: Sequence[int],
    rollout: Rollout,
    outlines: Sequence[Outline],
) -> dict[str, str]:
    """Write the update's columns of the trajectories that were recorded; only their tokens travel.

    owners: the trajectory of each sequence of the batch. Returns by uid how trained tokens differ from recorded ones.
    """
    saving, task = Saving(config), training(config, step)
    if not rollout.files:
        return {}
    files, done = [], 0
    for path, count in rollout.files:
        numbers = {
            one.uid: number
            for number, one in enumerate(outlines[done : done + count], done)
            if saving.takes(task, one.group)
        }
        files.append(RecordFile(path.absolute(), numbers))
        done += count
    recorded = {number for file in files for number in file.numbers.values()}
    chosen = batch.select([row for row, owner in enumerate(owners) if owner in recorded])
    return executor.compute(recorded_columns, chosen, files)[1]


def recorded_columns(batch: RaggedBatch, files: Sequence[RecordFile]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Write the record of a batch [T], where its tokens are; returns (no columns, the result of `write_updates`)."""
    return {}, write_updates(batch, files)
