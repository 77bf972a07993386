"""Groups that need not end where a call ends: the trajectories of one prompt, and the contract of those who run them.

A group is asked for once, and told about in few numbers when it has ended. Its tokens stay with whoever runs it until
they are packed into a batch: in one process as they are, under Ray in the journal (`agentrl.rollouts.journal`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentrl.engines.weights import SyncReport, Weights
from agentrl.rollouts.contract import Audience, Rollout, Rollouts, Task
from agentrl.rollouts.flow import Outcome
from agentrl.rollouts.journal import Journal
from agentrl.system.answers import Entry
from agentrl.system.loop_thread import LoopThread
from agentrl.trajectory import Outline, Status, Trajectory, exclusion
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.staleness import oldest_version


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One prompt, of which trajectories are to be run."""

    ordinal: int
    sample: Sample
    task: Task
    number: int
    """Number of the prompt in its task, by which trajectories are named and seeded."""


class Log(Protocol):
    """Answers to a group's trajectories, which are given again where they run again."""

    def read(self) -> Sequence[Entry]:
        """Return the entries."""
        ...

    def add(self, entry: Entry) -> None:
        """Take down an entry."""
        ...


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """How a group ended."""

    ordinal: int
    outcome: Outcome
    oldest: int | None
    """Version of the oldest token that is trained on; None where none is."""
    record: bytes | None
    """Its record in the journal; None: it has what the journal leaves out."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch of groups."""

    rollout: Rollout
    versions: Counter[int]
    """Sampled tokens that are trained on, by version."""


@runtime_checkable
class GroupRollouts(Rollouts, Protocol):
    """`Rollouts` that also run groups beside one another and beside updates.

    Coroutines are called on `loop`, everything else from one other thread, while no update is under way.
    """

    loop: LoopThread
    audience: Audience
    run_dir: Path
    on_loss: Callable[[], object]
    """Called on `loop` when groups cannot go on until `mend` is called."""

    @property
    def samples_on(self) -> bool:
        """The engine is not held while the policy is updated: its processors and its memory are its own."""
        ...

    @property
    def is_broken(self) -> bool:
        """A process died that `mend` is to replace."""
        ...

    async def run_group(
        self, work: GroupWork, on_begin: Callable[[int], None], on_end: Callable[[], None], log: Log | None
    ) -> EndedGroup:
        """Run and score a prompt's trajectories.

        `on_begin(version)`: the first of them began, by weights no older than `version`; called again where a process
        died and they begin in another. `on_end()`: one has ended. `log`: what they are answered is taken down in it,
        and what is there already is given again.
        """
        ...

    async def stop_groups(self) -> None:
        """Wait until groups whose `run_group` was cancelled have ended everywhere, and forget those that had ended."""
        ...

    async def hold(self) -> None:
        """Keep the engine from sampling; what it has sampled of running requests stays. Deadlines stand still."""
        ...

    async def go_on(self) -> None:
        """Let the engine sample again after `hold`."""
        ...

    async def release_weights(self) -> None:
        """Read the weights that were last given no more, for they are about to change."""
        ...

    async def offer_weights(self, weights: Weights, version: int) -> None:
        """Allow, after `release_weights`, to read weights for processes that come back; others keep what they have."""
        ...

    async def idle_seconds(self) -> float:
        """Return the seconds in which the engines had nothing to do since this was first called, on average."""
        ...

    def update_weights(self, weights: Weights, version: int, *, in_flight: bool = False) -> SyncReport:
        """See `Rollouts.update_weights`. `in_flight`: requests go on, of an engine that can do so."""
        ...

    def observed(self, task: Task, total: int | None) -> AbstractContextManager[Callable[[], None]]:
        """Show, watch and profile, on `loop`, what a coroutine waits for; it calls what this yields for each end."""
        ...

    def run_beside(
        self,
        task: Task,
        samples: Sequence[Sample],
        first: int,
        *,
        show: bool,
        before: Callable[[], Awaitable[None]],
        after: Callable[[], Awaitable[None]],
    ) -> Rollout:
        """Do as `run` does beside groups that go on, between `before` and `after`, which are awaited on `loop`."""
        ...

    def pack(self, task: Task, ordinals: Sequence[int], journal: Journal, *, show: bool = False) -> Packed:
        """Make the batch of groups that have ended, numbered from 0; those that ended elsewhere are in the journal."""
        ...

    def check(self) -> None:
        """Raise the error of tools that answer no call any more, or of a call that is on no cassette."""
        ...

    def mend(self) -> None:
        """Replace processes that died. Raises WorkerDied when that is not allowed any more."""
        ...


def outcome_of(
    trajectories: Sequence[Trajectory | Outline], teaches: Callable[[Sequence[Outline]], bool] | None
) -> Outcome:
    """Judge a group by how its trajectories ended. `teaches`: see `load_filter`."""
    if not any(exclusion(one) is None for one in trajectories):
        return Outcome.TIMEOUT if any(one.status is Status.TIMEOUT for one in trajectories) else Outcome.FAILED
    if teaches is None:
        return Outcome.SCORED
    outlines = (one if isinstance(one, Outline) else one.outline() for one in trajectories)
    compared = [one for one in outlines if not one.baseline and exclusion(one) is None]
    if len(compared) < 2:
        return Outcome.FAILED
    return Outcome.SCORED if teaches(compared) else Outcome.FILTERED


def oldest_trained(trajectories: Sequence[Trajectory]) -> int | None:
    """Return the version of the oldest token that is trained on; None where none is."""
    return oldest_version(one for one in trajectories if exclusion(one) is None)


def sampled_by_version(trajectories: Sequence[Trajectory]) -> Counter[int]:
    """Count the sampled tokens that are trained on, by version."""
    found: Counter[int] = Counter()
    for one in trajectories:
        for transcript in one.transcripts if exclusion(one) is None else ():
            for span in transcript.versions:
                found[span.version] += span.end - span.start
    return found
