"""Watches of a run: they see updates on each rank, and trajectories where these run, and change nothing.

Workers and rollouts call their events without a name of any watch. agentrl's checks are the watch `checks`;
`trainer.checks.watches` names a user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor

from agentrl.config.registries import WATCHES
from agentrl.model.plain import Twice
from agentrl.observe.report import Report
from agentrl.optim.optimizer import Optim
from agentrl.parallel.mesh import Mesh
from agentrl.trajectory.batch import RaggedBatch, Sequences

if TYPE_CHECKING:
    from agentrl.agent_loop import Request, Scheduler
    from agentrl.config.sections.actor import ActorConfig
    from agentrl.config.sections.rollouts import RolloutsConfig
    from agentrl.config.sections.sft import TuningConfig
    from agentrl.config.sections.training import Config
    from agentrl.engines.contract import RolloutEngine
    from agentrl.engines.weights import Weights
    from agentrl.trajectory import Trajectory
    from agentrl.trajectory.sample import Sample

Found = TypeVar("Found")
Watched = TypeVar("Watched", contravariant=True)
Owner = tuple[int, int]
"""Trajectory and role of a sequence."""
Seal = tuple[int, ...]
"""Trajectory of a sequence, then hashes of its columns (`agentrl.checks.update.seal`)."""
Comparison = Callable[[Twice | None, Sequences, torch.device], Report]
"""Compares a model's scores of one sequence with a second computation, where the model lies. None: there is none."""


class Stepped(Protocol):
    """A model that learns, as its steps are watched."""

    @property
    def params(self) -> Mapping[str, torch.nn.Parameter]: ...

    @property
    def tensors(self) -> Mapping[str, torch.nn.Parameter]: ...

    @property
    def optim(self) -> Optim: ...

    @property
    def mesh(self) -> Mesh: ...

    def not_restored(self) -> Sequence[str]:
        """Name what differs from the checkpoint that was loaded; nothing when asked again. Every rank must ask."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of one mini-batch, over all ranks."""

    policy_tokens: Tensor  # [members] int64, policy tokens of each of its sequences
    owners: Sequence[Owner]
    """By member."""
    successful: int = 0
    read: int = 0
    entropy_coeff: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning(Generic[Found]):
    """A role that learns on this rank."""

    kind: Literal["policy", "critic", "transcripts", "pairs", "judged"]
    config: Config | TuningConfig
    section: ActorConfig
    """Keys by which it learns; a critic and a training from files have their own in their place."""
    dtype: str
    total_steps: int
    """Training steps in which it learns."""
    scores: Callable[[Found], Mapping[str, Tensor]]
    """Takes scores [T] of tokens out of a forward pass's result: `score`, and `entropy` where the loss reads it."""


@dataclass(frozen=True, slots=True)
class UpdateChecked:
    """One rank's findings about an update, and the sequences that its losses were computed of."""

    report: Report
    seals: Sequence[Seal] = ()
    """One for each time; empty on all ranks but one of those that see the same tokens."""
    watched: bool = True
    """The backend called the watch."""


class UpdateWatch(Protocol[Watched]):
    """Observer of the updates of one role on one rank. Every rank calls its methods alike, in this order."""

    def begin(self, counts: Counts) -> None:
        """Begin a mini-batch with these counts, right before its optimizer step."""
        ...

    def scored(self, found: Watched, micro: RaggedBatch, factor: float) -> None:
        """Take the result of a micro-batch's forward pass, whose hooks are then given the loss's gradients.

        factor: of the loss before its backward pass.
        """
        ...

    def stepping(self, model: Stepped, norm: float, step: float) -> None:
        """Look at clipped gradients, whose norm was `norm`, right before the optimizer's step."""
        ...

    def stepped(self, model: Stepped, step: float) -> None:
        """Look at the weights after the optimizer's step of training step `step`."""
        ...

    def result(self) -> UpdateChecked:
        """Return the findings about the mini-batches of an update, and begin the next update."""
        ...


class TrajectoryWatch(Protocol):
    """Observer of the trajectories of one process, and of the weights that its engine is given.

    Its methods are called on the event loop of the rollouts, but `sending` and `sent` by the training thread.
    """

    def ended(
        self, asked: Sequence[tuple[Request, Sample]], trajectories: Sequence[Trajectory], *, trained: bool
    ) -> None:
        """See the trajectories of a prompt with their requests and its row. trained: they are no validation's."""
        ...

    def packed(self, trajectories: Sequence[Trajectory]) -> None:
        """See all trajectories of a batch, or of this process's part of it."""
        ...

    def sending(self, weights: Weights) -> Weights:
        """See weights on their way to the engine; return them, or the same weights whose reading is seen."""
        ...

    def sent(self, version: int) -> None:
        """Note that the engine has taken the weights of `sending`."""
        ...

    async def settle(self) -> None:
        """End the comparisons with the weights sent last: the next update may change them. Raises TrainingError."""
        ...

    def forget(self) -> None:
        """Drop notes about trajectories that were cancelled, and may run again."""
        ...

    def result(self) -> Report:
        """Return the findings since the last call."""
        ...


class Watch:
    """Base class of a watch. One is made on each rank, and in each process in which trajectories run.

    Findings become alarms, and numbers metrics of the step.
    """

    def updates(self, learning: Learning[Found]) -> UpdateWatch[Found] | None:
        """Watch the updates of a role; None: they are not watched."""
        return None

    def trajectories(
        self, config: RolloutsConfig, scheduler: Scheduler, engine: RolloutEngine
    ) -> TrajectoryWatch | None:
        """Watch the trajectories and the engine's weights of this process; None: they are not watched."""
        return None


def open_watches(names: Sequence[str]) -> list[Watch]:
    """Make agentrl's own watch, and the watches that `trainer.checks.watches` names.

    Raises ConfigError for a class that is no watch, CodeError where making one fails.
    """
    every = list(dict.fromkeys(("checks", *names)))
    return cast(list[Watch], WATCHES.make(every, {}, methods=("updates", "trajectories"), on_made=lambda _: None))


def owners_of(batch: Sequences, rows: Sequence[int]) -> list[Owner]:
    """List trajectory and role of the sequences `rows`; 0 without roles."""
    roles = batch.sequences["role"][rows].tolist() if batch.has("role") else [0] * len(rows)
    return list(zip(batch.trajectory[rows].tolist(), roles, strict=True))
