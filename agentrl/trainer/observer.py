"""Observers of training steps: what a step does in addition to the algorithm of `agentrl.trainer.step`.

They are the reports, the records and the checks of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from agentrl.algorithms.estimate import Estimate
    from agentrl.checks.report import Report
    from agentrl.config.sections.checks import Reaction
    from agentrl.rollouts.contract import Rollout
    from agentrl.system.metrics import Numbers
    from agentrl.trajectory import Outline
    from agentrl.trajectory.batch import RaggedBatch, Sequences

Event = Literal["on_rollout", "on_batch", "on_update", "on_published", "on_end"]
EVENTS: Sequence[Event] = ("on_rollout", "on_batch", "on_update", "on_published", "on_end")


@dataclass(frozen=True, slots=True)
class Parts:
    """Sequences of an update by their role in its losses; indices in its batch."""

    trajectory: list[int]
    """The trajectory of each sequence."""
    zero_advantage: list[int]
    """Sequences that the policy need not go over where they teach it nothing."""
    successes: list[int]
    """Sequences of trajectories that succeed; empty where no loss reads it."""
    observed: list[int]
    """Tokens of each sequence that the policy read after its first one."""


@dataclass(slots=True)
class Step:
    """A training step so far. An event has what is listed below it, and what earlier events had."""

    number: int
    version: int
    """Version of the policy that the step updates."""
    metrics: Numbers
    """Numbers to log: observers may add theirs before `on_end`."""
    found: Report
    """Findings of the checks, of which `on_published` makes alarms."""
    rollout: Rollout
    """`on_rollout` and later."""
    outlines: list[Outline]
    """All trajectories in outline, with the reward model's part of their rewards."""
    greedy_rewards: dict[int, float] | None
    """By prompt, the reward of its greedy trajectory; None where no such was drawn."""
    numbers: dict[int, Mapping[str, float]] | None
    """By trajectory, the numbers that the advantage estimator reads; None where it reads no number."""
    kl_coef: float | None
    """Coefficient of the KL in the reward; None without it."""
    readers: dict[str, Callable[[RaggedBatch], object]] = field(default_factory=dict)
    """Functions to call on the batch with its advantages, where the tokens are: `on_rollout` adds them."""
    batch: Sequences = field(init=False, repr=False)
    """The update's batch, with its advantages: `on_batch` and later."""
    estimate: Estimate = field(init=False, repr=False)
    read: dict[str, object] = field(init=False, repr=False)
    """Results of the readers, by name."""
    parts: Parts = field(init=False, repr=False)
    learnt: bool = False
    """Something of the batch teaches the policy."""
    updated: bool = False
    """The policy was updated: `on_update` and later."""
    alarm: str | None = None
    """Text of the step's alarms: `on_end`."""
    reaction: Reaction = "warn"
    """The reaction that the alarms ask for."""

    @property
    def sampled(self) -> list[Outline]:
        """The outlines that are no baseline."""
        return [outline for outline in self.outlines if not outline.baseline]


class StepObserver:
    """Base class of an observer of steps.

    Events are called on the driver, between two parts of a step, in the order of the methods below; a step that ends
    early calls only the first of them. They may add to `step.metrics`, and must change nothing else.
    """

    def on_rollout(self, step: Step) -> None:
        """See the step's trajectories, with their rewards."""

    def on_batch(self, step: Step) -> None:
        """See the batch of the update, with its advantages."""

    def on_update(self, step: Step) -> None:
        """See the updated policy. A step without anything to train on has no such event."""

    def on_published(self, step: Step) -> None:
        """See the step after the engine has the new weights."""

    def on_end(self, step: Step) -> None:
        """See the step with all metrics, those of its validation included. They are logged."""


class Observers:
    """Observers in the order in which each event calls them."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self._methods: dict[Event, list[Callable[[Step], None]]] = {
            event: [
                getattr(one, event)
                for one in observers
                if getattr(type(one), event) is not getattr(StepObserver, event)
            ]
            for event in EVENTS
        }

    def tell(self, event: Event, step: Step) -> None:
        """Call an event."""
        for method in self._methods[event]:
            method(step)
