"""Observers of training steps: the work of a step in addition to the algorithm of `agentrl.trainer.step`.

They are the reports, the records and the checks of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, cast

from agentrl.config.registries import STEP_OBSERVERS
from agentrl.errors import ConfigError, UserError
from agentrl.system.registry import refuse_coroutines
from agentrl.system.user_code import code_error, contract_error

if TYPE_CHECKING:
    from agentrl.config.sections.checks import Reaction
    from agentrl.observe.report import Report
    from agentrl.rollouts.contract import Rollout
    from agentrl.system.metrics import Numbers
    from agentrl.trajectory import Outline
    from agentrl.trajectory.batch import RaggedBatch, Sequences

P = ParamSpec("P")
Event = Literal["on_rollout", "on_batch", "on_update", "on_published", "on_end"]
EVENTS: Sequence[Event] = ("on_rollout", "on_batch", "on_update", "on_published", "on_end")
METHODS = ("on_first_validation", *EVENTS, "forget_after", "close")


@dataclass(slots=True, kw_only=True)
class StepDone:
    """A training step as its run sees it."""

    number: int
    metrics: Numbers
    """Numbers to log: observers may add theirs before `on_end`."""
    shown: Numbers = field(default_factory=dict)
    """Numbers to show next to the progress."""
    tokens: int = 0
    """Tokens of the batch."""
    stop: str | None = None
    """Why the run ends after this step, in words; None: it goes on. Observers may set it at any event: the run is then
    validated (at `on_end` no more), saved and exported as after its last step."""
    alarm: str | None = None
    """Text of the step's alarms: `on_end`."""
    reaction: Reaction = "warn"
    """The reaction that the alarms ask for."""


@dataclass(slots=True, kw_only=True)
class Step(StepDone):
    """A training step so far. An event has the fields listed below it, and the fields of earlier events."""

    run_dir: Path
    """Folder of the run."""
    version: int
    """Version of the policy that the step updates."""
    found: Report
    """Findings of the checks, of which `on_published` makes alarms."""
    rollout: Rollout
    """`on_rollout` and later."""
    outlines: list[Outline]
    """All trajectories in outline, with the reward model's part of their rewards."""
    kl_coef: float | None
    """Coefficient of the KL in the reward; None without it."""
    readers: dict[str, Callable[[RaggedBatch], object]] = field(default_factory=dict)
    """Functions to call on the batch with its advantages, where the tokens are: `on_rollout` adds them."""
    batch: Sequences = field(init=False, repr=False)
    """The update's batch, with its advantages: `on_batch` and later."""
    read: dict[str, object] = field(init=False, repr=False)
    """Results of the readers, by name."""
    learnt: bool = False
    """Something of the batch teaches the policy."""
    updated: bool = False
    """The policy was updated: `on_update` and later."""

    @property
    def sampled(self) -> list[Outline]:
        """The outlines that are no baseline."""
        return [outline for outline in self.outlines if not outline.baseline]


class StepObserver:
    """Base class of an observer of steps. Choose one of your own by `trainer.observers`.

    Events are called on the driver, between two parts of a step, in the order of the methods below; a step that ends
    early calls only the first of them. They may add to `step.metrics` and set `step.stop`, and must change nothing
    else. After a worker's death, and in a run that resumes, steps since the checkpoint are done again: `forget_after`
    names the checkpoint's.

    A class that `trainer.observers` names is made without arguments, or with `options` where it has that parameter.
    """

    def on_first_validation(self, step: StepDone) -> None:
        """See the metrics of the validation before the first step; those of later ones are in their step's."""

    def on_rollout(self, step: Step) -> None:
        """See the step's trajectories, with their rewards."""

    def on_batch(self, step: Step) -> None:
        """See the batch of the update, with its advantages."""

    def on_update(self, step: Step) -> None:
        """See the updated policy. A step without anything to train on has no such event."""

    def on_published(self, step: Step) -> None:
        """See the step after the engine has the new weights."""

    def on_end(self, step: Step) -> None:
        """See the step with all metrics, its validation included. They are logged."""

    def forget_after(self, step: int) -> None:
        """Forget the steps after `step`, which are done again; -1: all. Called before the first step, too."""

    def close(self) -> None:
        """Free the observer's resources at the end of the run."""


class Observers:
    """Observers in the order in which each event calls them."""

    def __init__(self, ours: Sequence[StepObserver], of_user: Sequence[StepObserver] = ()) -> None:
        """`of_user`: called after `ours`; their errors are errors of user code."""
        self._methods: dict[Event, list[Callable[[Step], None]]] = {
            event: [
                *(getattr(one, event) for one in ours if _has(one, event)),
                *(partial(_tell, getattr(one, event)) for one in of_user if _has(one, event)),
            ]
            for event in EVENTS
        }
        self._ours, self._of_user = ours, of_user

    def forget_after(self, step: int) -> None:
        """Have all observers forget the steps after `step`."""
        for one in self._ours:
            one.forget_after(step)
        for one in self._of_user:
            _call(one.forget_after, step)

    def tell_first_validation(self, step: StepDone) -> None:
        """Show the validation before the first step, or of a run that only validates, to all observers."""
        for one in self._ours:
            one.on_first_validation(step)
        for one in self._of_user:
            _call(one.on_first_validation, step)

    def tell(self, event: Event, step: Step) -> None:
        """Call an event."""
        for method in self._methods[event]:
            method(step)


@contextmanager
def open_observers(
    names: Sequence[str], options: Mapping[str, Mapping[str, object]], objects: Sequence[StepObserver]
) -> Iterator[list[StepObserver]]:
    """Make the observers of `trainer.observers`, and add the objects that a script gives; close all of them at the end,
    in reverse order, also where one of them cannot be made.

    Raises ConfigError for an object that is no observer, CodeError where making or closing one fails.
    """
    for number, one in enumerate(objects):
        if not isinstance(one, StepObserver):
            raise ConfigError(f"observers[{number}]: expected an object of a StepObserver's class, found {one!r:.200}")
        refuse_coroutines(f"observers[{number}]", type(one).__name__, type(one), METHODS)
    with ExitStack() as stack:

        def close_later(one: object) -> None:
            stack.callback(_call, cast(StepObserver, one).close)

        for one in objects:
            close_later(one)
        made = STEP_OBSERVERS.make(names, options, methods=METHODS, on_made=close_later)
        yield [*cast(list[StepObserver], made), *objects]


def _has(observer: StepObserver, event: Event) -> bool:
    return getattr(type(observer), event) is not getattr(StepObserver, event)


def _call(method: Callable[P, None], *seen: P.args, **named: P.kwargs) -> None:
    """Call a user's method. Raises CodeError for its error."""
    try:
        method(*seen, **named)
    except UserError:  # e.g. of a worker that died while the method read the batch
        raise
    except (Exception, SystemExit) as error:
        raise code_error(STEP_OBSERVERS.what, error, method) from error


def _tell(method: Callable[[Step], None], step: Step) -> None:
    """Call an event of a user's observer. Raises CodeError for its error, and for a metric that is no number then."""
    _call(method, step)
    for name, value in step.metrics.items():
        if not isinstance(value, Real):
            problem = f"step.metrics[{name!r}] must be a number, found {value!r:.200}"
            raise contract_error(STEP_OBSERVERS.what, method, problem)
    if not isinstance(step.stop, str | None):
        problem = f"step.stop must be a text that says why the run ends, found {step.stop!r:.200}"
        raise contract_error(STEP_OBSERVERS.what, method, problem)
