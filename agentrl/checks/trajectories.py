"""Checks of the trajectories that end in this process, of their records, and of the weights that its engine has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch

from agentrl.agent_loop import Request, Scheduler
from agentrl.checks.origin import Origins
from agentrl.checks.transcripts import check_record, count_text
from agentrl.checks.weights import WeightWatch
from agentrl.config.sections.training import Config
from agentrl.engines.contract import EngineError, RolloutEngine
from agentrl.engines.weights import Weights
from agentrl.errors import TrainingError
from agentrl.observe.report import Report
from agentrl.trajectory import Trajectory
from agentrl.trajectory.sample import Sample

RENDERED = 4
"""Prompts of a step of which about one trajectory is rendered again."""


class TrajectoryChecks:
    """Implements `agentrl.observe.watch.TrajectoryWatch`. Where nothing is trained, no origins are compared."""

    def __init__(self, config: Config, scheduler: Scheduler, engine: RolloutEngine) -> None:
        self._context, self._engine, self._records = scheduler.context, engine, config.trainer.checks.trajectories
        self._origins: Origins | None = None
        if not config.trainer.val_only:
            self._origins = Origins(scheduler, max(1, config.prompts_per_draw // RENDERED))
        self._weights = WeightWatch(config.trainer.checks.weights_mb)
        self._passed: Mapping[str, torch.Tensor] = {}
        """Tensors of the weights that are sent."""
        self._sent: tuple[Mapping[str, torch.Tensor], int] | None = None
        """Tensors that are to be compared with the engine's, and their version; no update changes them before."""
        self._report = Report()

    def ended(
        self, asked: Sequence[tuple[Request, Sample]], trajectories: Sequence[Trajectory], *, trained: bool
    ) -> None:
        """Compare trajectories with their rows, requests, tools and scorers."""
        if self._origins is not None:
            self._report.add(self._origins.check(asked, trajectories, trained=trained))

    def packed(self, trajectories: Sequence[Trajectory]) -> None:
        """Check the records of some of the trajectories."""
        begun, chat = time.thread_time(), self._context.chat
        # Drawn by a hash of their names, so that each step has others.
        drawn = sorted(trajectories, key=lambda one: blake2b(one.uid.encode(errors="replace"), digest_size=8).digest())
        for one in drawn[: self._records]:
            found = check_record(one, chat)
            self._report.add_check("record", found)
            self._report.evaluated["mask"] += not found
            self._report.text += count_text(one, chat)
        self._report.seconds += time.thread_time() - begun

    def sending(self, weights: Weights) -> Weights:
        weights, self._passed = self._weights.watched(weights, self._engine)
        return weights

    def sent(self, version: int) -> None:
        self._sent = self._passed, version

    async def settle(self) -> None:
        """Compare the engine's weights with the weights sent last, if that was not done.

        With servers that sample it waits for their steps, so that it is done after new trajectories have begun.
        """
        if self._sent is None:
            return
        (passed, version), self._sent = self._sent, None
        begun = time.thread_time()
        try:
            found = await self._weights.check(self._engine, passed, version)
        except EngineError as error:
            raise TrainingError(f"weights of step {version}: {error}") from error
        self._report.add_check("weights/version", found)
        self._report.evaluated["weights"] += self._weights.compared > 0
        self._report.unchanged = self._weights.unchanged
        self._report.seconds += time.thread_time() - begun

    def forget(self) -> None:
        if self._origins is not None:
            self._origins.forget()

    def result(self) -> Report:
        """Return the findings so far, and forget the turns that others are compared with."""
        if self._origins is not None:
            self._origins.sampled.clear()
        report, self._report = self._report, Report()
        return report
