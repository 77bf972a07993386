"""A training that its caller drives, a step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl.config import Config
from agentrl.trainer.step import Trainer


class TrainingRun:
    """An open training. Iterating trains: each item is the metrics of the step that was just done.

    A new iteration continues where an earlier one was left. When the iteration is exhausted, the work after the last
    step is done (the policy is exported). A run that is closed before continues, later, from its newest checkpoint.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._steps = trainer.steps()

    @property
    def config(self) -> Config:
        """The config, with the paths of files made for the quickstart."""
        return self._trainer.config

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return self._trainer.dir

    @property
    def step(self) -> int:
        """Steps done, including steps before a resume; 0 before the first, and until the iteration begins."""
        return self._trainer.step

    @property
    def total_steps(self) -> int:
        """The step after which the run ends."""
        return self._trainer.total_steps

    @property
    def validation(self) -> dict[str, float]:
        """Metrics of the last validation; empty before the first."""
        return self._trainer.validated

    @property
    def evaluated(self) -> dict[str, int]:
        """By check (docs/reliability.md), how often it compared something since the run began; others never did."""
        return dict(self._trainer.checks.history.evaluated)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return self._steps

    def close(self) -> None:
        """Wait for checkpoints that are being written. Iterating ends here."""
        self._steps.close()
