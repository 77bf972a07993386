"""The base of all workers that train: optimizer steps that may be skipped, saving and loading.

A mini-batch whose loss or gradient is not finite is skipped: weights and optimizer state stay as they were, and the
training continues. It ends when every mini-batch of a role was skipped in MAX_SKIPPED training steps in a row; a run
that is continued counts from 0 again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from agentrl.errors import TrainingError
from agentrl.observe.watch import Counts, Learning, UpdateChecked, UpdateWatch, open_watches
from agentrl.parallel.collectives import rank
from agentrl.system.plugin import with_present_names
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.backend import Backend, MiniBatch, StepReport

logger = logging.getLogger(__name__)

MAX_SKIPPED = 5
"""Training steps in a row in which all mini-batches of a role were skipped, after which it is no accident."""
CHECKED = ("rewards", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")
"""Columns that are looked at when a loss is not finite."""
RENAMED = {"at_work": "on_device"}
"""Name of a method that a backend of a user's may have instead."""

Found_co = TypeVar("Found_co", covariant=True)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Result of the optimizer steps of one training step."""

    taken: list[StepReport]
    skipped: int
    """Mini-batches whose loss or gradient was not finite."""

    def metrics(self, role: str, terms: Mapping[str, str], by_token: Mapping[str, str]) -> dict[str, float]:
        """Reduce to <role>/skipped_updates and, over the steps taken, the means of <role>/grad_norm and <role>/lr.

        terms: further means, {metric: sum of the loss function}. by_token: sums divided by the sum `tokens`, named
        alike. Metrics that there is nothing to be taken over for are left out.
        """
        found = {"skipped_updates": float(self.skipped)}
        if self.taken:
            rows = [
                {"grad_norm": report.grad_norm, "lr": report.lr}
                | {name: report.sums.get(key, 0.0) for name, key in terms.items()}
                for report in self.taken
            ]
            found |= {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        tokens = sum(report.sums.get("tokens", 0.0) for report in self.taken) if by_token else 0.0
        if tokens:
            found |= {
                name: sum(report.sums.get(key, 0.0) for report in self.taken) / tokens for name, key in by_token.items()
            }
        return {f"{role}/{name}": value for name, value in found.items()}


class TrainableWorker(Generic[Found_co]):
    """One rank's part of a role that learns, through a backend."""

    def __init__(
        self, backend: Backend[Found_co], learning: Learning[Found_co] | None = None, watches: Sequence[str] = ()
    ) -> None:
        """learning: seen by agentrl's watch, and by the named `watches`; None: nothing sees the updates."""
        self._learner = with_present_names(backend, RENAMED)
        found = [] if learning is None else [one.updates(learning) for one in open_watches(watches)]
        self._watches = [one for one in found if one is not None]
        self._barren = 0
        """Training steps in a row, up to the last one, in which every mini-batch was skipped."""

    def checked(self) -> list[UpdateChecked]:
        """Return the findings about the last update, by watch."""
        return [one.result() for one in self._watches]

    def save(self, dir: Path, *, background: bool = False) -> list[str]:
        """Begin to write the trained parameters and their optimizer state; `load` of them continues bit for bit.

        Returns the files in `dir` that this rank writes. Without `background` they are on the disk then; with it they
        are only copied to host memory, and `finish_save` says when they are written.
        """
        return self._learner.save(Path(dir), background=background)

    def finish_save(self, *, wait: bool = True) -> bool:
        """Return true when this rank's files of the last save are on the disk. Raises the error of writing them."""
        return self._learner.finish_save(wait=wait)

    def load(self, dir: Path) -> None:
        """Load the files of `save`. Raises CheckpointError when they are of another model or half-written."""
        self._learner.load(Path(dir))

    def _watched(self, counts: Counts) -> list[UpdateWatch[Found_co]]:
        """Have the watches begin a mini-batch with these counts."""
        for one in self._watches:
            one.begin(counts)
        return self._watches

    def _learn(self, minis: Iterable[MiniBatch[Found_co]], *, step: int, rates: int = 1) -> UpdateReport:
        """Take one optimizer step for each mini-batch whose loss and gradient are finite.

        step: training steps in which this role has learnt, this one included, for the learning rate. rates: learning
        rates of the step: 1, or one for each mini-batch.

        Raises TrainingError, with the weights untouched, when nothing could be learnt for too long.
        """
        taken: list[StepReport] = []
        skipped, cause = 0, ""
        with self._learner.on_device():
            for place, mini in enumerate(minis):
                report = self._learner.step(mini, step if rates == 1 else step + place / rates)
                if math.isfinite(report.grad_norm) and math.isfinite(report.loss):
                    taken.append(report)
                    continue
                skipped, cause = skipped + 1, f"{mini.where}: {self._not_finite(mini, report)}"
        if skipped and rank() == 0:
            logger.warning("%s mini-batches skipped of %s; the last: %s", skipped, skipped + len(taken), cause)
        self._barren = self._barren + 1 if skipped and not taken else 0
        if self._barren >= MAX_SKIPPED:
            raise TrainingError(f"{cause} It is the {MAX_SKIPPED}th training step in a row in which nothing was learnt")
        return UpdateReport(taken, skipped)

    def _blame(self, report: StepReport) -> str:
        """Say what is not finite where the batch is: the end of a sentence, and the remedy."""
        return (
            "the model's own are not: lower optim.lr or grad_clip, or use float32; if it happens at the first step, "
            "the model's weights are broken."
        )

    def _not_finite(self, mini: MiniBatch[Found_co], report: StepReport) -> str:
        """Describe the fault in the mini-batch of all ranks; every rank must ask."""
        mine = self._learner.share_of(mini.sequences)
        names = [name for name in CHECKED if mine.has(name)]
        counts = [_broken(mine, name) for name in names]
        sums = self._learner.sum(torch.tensor([*counts, int(mine.mask.sum())], dtype=torch.float64))
        *counts, tokens = map(int, sums)
        bad = [
            f"{name} ({count} of {tokens} policy tokens)" for name, count in zip(names, counts, strict=True) if count
        ]
        cause = (
            f"Not finite in the batch: {', '.join(bad)}; look at the advantage estimator, the reward function and the "
            "log-probs first."
            if bad
            else f"All numbers of the batch are finite, so {self._blame(report)}"
        )
        return (
            f"the loss is {report.loss} and the gradient norm {report.grad_norm}. The weights stand as they were "
            f"before this mini-batch. {cause}"
        )


def _broken(batch: RaggedBatch, name: str) -> int:
    """Count the policy tokens whose entry of a column is not finite."""
    column: torch.Tensor = getattr(batch, name)
    return int((~torch.isfinite(column[batch.mask])).sum())
