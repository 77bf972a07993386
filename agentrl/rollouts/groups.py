"""Groups that may outlive a call: the trajectories of one prompt, and how they are judged.

A group is requested once; when it has ended, a few numbers describe it. Its tokens stay in the process that runs it
until they are packed into a batch: in one process as they are, under Ray in the journal (`agentrl.rollouts.journal`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.rollouts.contract import Task
from agentrl.rollouts.staleness_scheduler import GroupStatus
from agentrl.system.answers import Entry
from agentrl.trajectory import Outline, Status, Trajectory, exclusion
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.staleness import oldest_version


@dataclass(frozen=True, slots=True)
class PromptTask:
    """One prompt whose trajectories are to be run."""

    ordinal: int
    sample: Sample
    task: Task
    number: int
    """Number of the prompt in its task, by which trajectories are named and seeded."""


@dataclass(frozen=True, slots=True)
class Log:
    """Answers to a group's trajectories, which are given again where they run again."""

    read: Callable[[], Sequence[Entry]]
    """Returns the entries."""
    add: Callable[[Entry], None]
    """Takes down an entry."""


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """How a group ended."""

    ordinal: int
    outcome: GroupStatus
    oldest: int | None
    """Version of the oldest token that is trained on; None without such tokens."""
    record: bytes | None
    """Its record in the journal; None: it has parts that the journal leaves out."""


def judge_group(
    trajectories: Sequence[Trajectory | Outline], teaches: Callable[[Sequence[Outline]], bool] | None
) -> GroupStatus:
    """Judge a group by how its trajectories ended. `teaches`: see `load_filter`."""
    if not any(exclusion(one) is None for one in trajectories):
        return GroupStatus.TIMEOUT if any(one.status is Status.TIMEOUT for one in trajectories) else GroupStatus.FAILED
    if teaches is None:
        return GroupStatus.SCORED
    outlines = (one if isinstance(one, Outline) else one.outline() for one in trajectories)
    compared = [one for one in outlines if not one.baseline and exclusion(one) is None]
    if len(compared) < 2:
        return GroupStatus.FAILED
    return GroupStatus.SCORED if teaches(compared) else GroupStatus.FILTERED


def oldest_trained(trajectories: Sequence[Trajectory]) -> int | None:
    """Return the version of the oldest token that is trained on; None without such tokens."""
    return oldest_version(one for one in trajectories if exclusion(one) is None)


def sampled_by_version(trajectories: Sequence[Trajectory]) -> Counter[int]:
    """Count the sampled tokens that are trained on, by version."""
    found: Counter[int] = Counter()
    for one in trajectories:
        for transcript in one.transcripts if exclusion(one) is None else ():
            for span in transcript.versions:
                found[span.version] += span.end - span.start
    return found
