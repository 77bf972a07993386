"""When trajectories are run: the contract of the source of a step's trajectories, and of its part of a checkpoint.

The training loop knows a `TrajectorySource` and no lower layer. The source owns the stream of prompts, because only it
knows which prompts have begun. Where rollouts and updates take turns, these are exactly the prompts of the step. Where
they overlap, they include prompts of later steps, which a checkpoint must not lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentrl.checks.report import Report
from agentrl.data.loader import Loader
from agentrl.engines.weights import SyncReport, Weights
from agentrl.rollouts.async_source import AsyncSource as TakingTurns
from agentrl.rollouts.contract import Rollout
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Metrics
from agentrl.trajectory import Outline
from agentrl.trajectory.sample import Sample

__all__ = ["TakingTurns", "TrajectorySource"]  # plugins subclass TakingTurns


class TrajectorySource(Protocol):
    """Source of the trajectories of each step.

    One step calls, in this order: `next_batch`, `metrics`, `sleep`, then, when the update is done, `publish` (if it
    made weights, or the source `needs_weights`) and `updated`. Validation and checkpoints fall between two steps;
    `state` may be called at any time. All calls come from one thread; each raises the errors of `RolloutRunner`.
    """

    @property
    def needs_weights(self) -> bool:
        """No trajectory continues before the next `publish`, also if the step changed no weight."""

    @property
    def loader(self) -> Loader:
        """The order of the rows."""

    @property
    def max_staleness(self) -> int | None:
        """Versions that a token of a batch may be older than the policy; None: any number."""

    @property
    def served(self) -> int:
        """Version of the policy that the engine has."""

    def next_batch(self, step: int, *, show: bool = False) -> Rollout:
        """Wait for the trajectories that `step` is trained on; with `show`, show one of them whole.

        The policy that is updated with them is the policy that `publish` was last given.
        """

    def validate(
        self, samples: Sequence[Sample], step: int, *, greedy: bool, show: bool = False, first: int = 0
    ) -> Rollout:
        """Run trajectories of `samples`, whose prompts are numbered from `first`, all by the weights of `step`."""

    def fill_rewards(self, files: Sequence[tuple[Path, int]], outlines: Sequence[Outline]) -> None:
        """Write the reward model's part of rewards into the files of a rollout, whose outlines these are now."""

    def sleep(self) -> None:
        """Give up, until `publish`, the memory that the engine shares with the policy."""

    def publish(self, weights: Weights, version: int) -> SyncReport:
        """Publish the policy's current weights. `version` grows with each step that changed it.

        `weights` may be the live ones: they are read before the call returns, or again while requests run.
        """

    def updated(self, outlines: Sequence[Outline]) -> None:
        """Take note that a step's update has ended, whether or not it made weights; its step had these trajectories."""

    def metrics(self) -> Metrics:
        """Take the numbers of engine, tools, interactions and scorers since they were last taken."""

    def checked(self) -> Report:
        """Take the findings of checks about trajectories and the engine's weights since the last call."""

    def state(self) -> dict[str, JSON]:
        """Return, as JSON values, the state that a run continued after the current step needs: the position in the
        data.

        A checkpoint holds these keys next to its own. The call changes no state, also while an update is under way.
        """

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Continue where `state()` was taken; `publish` follows. Other keys of a checkpoint are ignored.

        Raises DataError when the data are others.
        """

    def saved(self) -> None:
        """Take note that a checkpoint with the last `state` is saved, or is being written."""

    def report(self) -> str | None:
        """Report the prompts by status at the run's end; None where there is nothing to report."""

    def restart_workers(self) -> None:
        """Replace workers that died; `load_state` and `publish` follow."""
