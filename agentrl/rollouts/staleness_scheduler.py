"""Which prompts may begin, which batch they are trained in, and how each ends: a state machine.

It has no I/O and no clock. A state is a value: every transition returns the next one, so that all orders of events can
be searched (`tests/rollouts/test_staleness_scheduler.py`). Prompts are known by their ordinal in the stream of data,
and the trajectories of a prompt are its group.

One rule keeps the bound. Groups are taken B at a time from version v on, earliest deadlines first. They are **in time**
for v if each is taken before its deadline has passed. A group is admitted only if all are in time afterwards for the
next batch. A batch is taken only if the rest is in time for the batch after it. The second half alone could leave the
trainer waiting for ever. During an update, and with publish_every above 1, the engine serves an older version than the
one at which the next batch is taken. Groups admitted by their number alone may then be due sooner than batches of B can
take them. With a bound of 0 the rule admits nothing ahead of the next batch: rollouts and updates take turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from agentrl.errors import TrainingError
from agentrl.system.json_value import JSON
from agentrl.trajectory.staleness import deadline, publish_lag


class GroupStatus(StrEnum):
    """How the trajectories of a group ended, taken together."""

    SCORED = "scored"
    """One of them at least can be trained on."""
    FILTERED = "filtered"
    """Their rewards are equal, and such groups are to be replaced (dynamic sampling)."""
    FAILED = "failed"
    TIMEOUT = "timeout"


class PromptStatus(StrEnum):
    """The status of a prompt. Each has one, which is final unless it is `OPEN`."""

    OPEN = "open"
    """Admitted, and taken by no batch yet."""
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    """The run ended before a batch took it, or the only batch that could take it had no place for it."""


PROMPT_STATUSES = {
    GroupStatus.SCORED: PromptStatus.TRAINED,
    GroupStatus.FILTERED: PromptStatus.FILTERED,
    GroupStatus.FAILED: PromptStatus.FAILED,
    GroupStatus.TIMEOUT: PromptStatus.TIMEOUT,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds of a schedule, checked: raises ValueError for bounds that cannot hold."""

    batch_size: int
    """B, the groups of a batch."""
    last_step: int
    """Batches that are taken in all."""
    max_staleness: int = 0
    """K: no group is trained on that is more stale; 0: rollouts and updates take turns."""
    depth: int = 0
    """D: batches that may be begun in addition to the next batch to take; from 1 to K, where K is above 0."""
    publish_every: int = 1
    """T: every T-th version is sent to the engine; at most K + 1."""
    replaces: bool = False
    """Groups that are not SCORED leave when they end, and others are admitted in their place. Otherwise FAILED and
    TIMEOUT ones take their places in batches."""
    most_left: int | None = None
    """Groups that may leave before a batch is taken; None: any number. With one more the schedule `is_exhausted`."""
    draw_size: int | None = None
    """Prompts that begin together, while no group is open, with a bound of 0. A batch takes the first of them that it
    has a place for. None: as many as the batch has places."""
    most_draws: int | None = None
    """Times that `draw_size` prompts may begin for a batch; None: any number. Where the batch is still not full the
    schedule `is_exhausted`."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.max_staleness < 0:
            raise ValueError(f"batch_size is {self.batch_size} and max_staleness {self.max_staleness}")
        if not min(self.max_staleness, 1) <= self.depth <= self.max_staleness:
            raise ValueError(f"depth is {self.depth}; expected 1 to {self.max_staleness}, the bound, or 0 where it is")
        if self.draw_size is not None and (self.max_staleness or self.draw_size < 1):
            raise ValueError(f"draw_size is {self.draw_size}; expected 1 or more, with max_staleness=0")
        if not 1 <= self.publish_every <= self.max_staleness + 1:
            raise ValueError(f"publish_every is {self.publish_every}; expected 1 to {self.max_staleness + 1}")


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt that is admitted and that no batch has taken."""

    ordinal: int
    since: int
    """No token of the group is older than this version. It is the version served at its admission; from its beginning,
    the version served then; once it has ended, the version of its oldest token."""
    outcome: GroupStatus | None = None
    """None: open, its trajectories have not all ended. Otherwise it is ready."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was taken."""

    schedule: StalenessScheduler
    """The state after it."""
    statuses: dict[int, PromptStatus]
    """Status of each of its prompts, and of prompts that left since the batch before, by ordinal in rising order."""
    ordinals: tuple[int, ...]
    """Its prompts, in rising order."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """No batch can be taken yet."""

    ordinals: tuple[int, ...]
    """Open groups: until one of them ends, there is no batch."""


@dataclass(frozen=True, slots=True)
class StalenessScheduler:
    """State of the schedule. Transitions raise RuntimeError where they are not allowed."""

    settings: Settings
    step: int = 0
    """Batches taken so far."""
    version: int = 0
    """Version of the policy; while `updating`, the version that the update started from."""
    served: int = 0
    """Version of the weights that a request made now is answered by, or an older one."""
    next_ordinal: int = 0
    updating: bool = False
    """A batch is taken, and its update has not ended."""
    paused: bool = False
    """Nothing is admitted: a validation runs."""
    groups: tuple[Group, ...] = ()
    """Groups that are open or ready, by rising ordinal."""
    left: tuple[tuple[int, PromptStatus], ...] = ()
    """Prompts that left since the last batch was taken, with their statuses."""

    def late(self, groups: Iterable[Group], version: int) -> int | None:
        """Find groups that are taken too late by batches taken from `version` on, earliest deadlines first.

        Returns the `since` of the first. Groups with one deadline are counted together, and the last of them has to be
        in time. Sorting thousands of groups for each admission would take seconds of a step.
        """
        size, bound, places = self.settings.batch_size, self.settings.max_staleness, 0
        for since, count in sorted(Counter(map(attrgetter("since"), groups)).items()):
            places += count
            if deadline(since, bound) < version + (places - 1) // size:
                return since
        return None

    @property
    def room(self) -> int:
        """Return how many prompts may begin at most before the next batch is taken, if no prompt leaves.

        Near the last step they are as many as the remaining steps take.
        """
        if (size := self.settings.draw_size) is not None:
            begun = len(self.drawn) % size
            if not begun and (self.is_open or len(self.groups) >= self.settings.batch_size or self._is_drawn_out):
                return 0
            return size - begun
        batches = min(1 + self.settings.depth, self.settings.last_step - self.step)
        return batches * self.settings.batch_size - len(self.groups)

    @property
    def can_admit(self) -> bool:
        """Another prompt may begin now."""
        if self.paused or self.room <= 0:
            return False
        another = Group(self.next_ordinal, self.served)
        # The batch takes some of the groups that are drawn together, and the others leave.
        before = self.groups if self.settings.draw_size is None else ()
        return self.late((*before, another), self.version + self.updating) is None

    def admit(self) -> StalenessScheduler:
        """Begin the prompt `next_ordinal`."""
        if not self.can_admit:
            raise RuntimeError(f"prompt {self.next_ordinal} may not begin yet")
        begun = Group(self.next_ordinal, self.served)
        return replace(self, groups=(*self.groups, begun), next_ordinal=self.next_ordinal + 1)

    @property
    def is_open(self) -> bool:
        """The trajectories of a group have not all ended."""
        return any(group.outcome is None for group in self.groups)

    @property
    def drawn(self) -> range:
        """Prompts that began since the last batch was taken, where nothing begins ahead."""
        return range(self.next_ordinal - len(self.groups) - len(self.left), self.next_ordinal)

    def place(self, ordinal: int) -> tuple[int, int]:
        """Return the step and the number in it by which a group's trajectories are named and seeded.

        A group that begins ahead has the names that it would have if nothing did: so they depend on its ordinal alone.
        """
        if self.settings.max_staleness:
            return ordinal // self.settings.batch_size + 1, ordinal % self.settings.batch_size
        return self.step + 1, ordinal - self.drawn.start

    def begin(self, ordinal: int, version: int | None = None) -> StalenessScheduler:
        """Let the first trajectory of an open group begin: its tokens are no older than the version served now.

        `version`: the version served when the group began, where this call comes late. Call it once, and again where
        the group restarts without its sampled tokens. A group without this call counts from its admission on.
        """
        group = self._open(ordinal)
        served = self.served if version is None else min(version, self.served)
        return self._with(replace(group, since=max(group.since, served)))

    def finish(self, ordinal: int, outcome: GroupStatus, oldest: int | None) -> tuple[StalenessScheduler, PromptStatus]:
        """End an open group, whose oldest token is of version `oldest` (None: it has no token).

        Returns the state and the prompt's status; OPEN: it is ready, and a batch will take it. Otherwise it has left:
        its place is free for another, and the next batch names its status. Raises TrainingError where no such version
        can have been sampled.
        """
        group = self._open(ordinal)
        if oldest is not None and not group.since <= oldest <= self.version:
            raise TrainingError(
                f"prompt {ordinal}: its engine says that a token is of version {oldest}; expected {group.since} to "
                f"{self.version}, which were served since the prompt began. Look at how the engine is sent weights, "
                "and what it says of them"
            )
        if outcome is not GroupStatus.SCORED and self.settings.replaces:
            return self._without(group, PROMPT_STATUSES[outcome]), PROMPT_STATUSES[outcome]
        since = group.since if oldest is None else oldest
        return self._with(replace(group, since=since, outcome=outcome)), PromptStatus.OPEN

    def restore(self, ordinal: int, outcome: GroupStatus | None, oldest: int | None) -> StalenessScheduler:
        """End an open group as it ended in an earlier process, whose tokens may be older than the version served now.

        A group without an outcome had not ended, and continues. Where it or another group could then be taken too late
        only, the same state is returned.
        """
        group = self._open(ordinal)
        if outcome not in (None, GroupStatus.SCORED) and self.settings.replaces:
            return self._without(group, PROMPT_STATUSES[outcome])
        found = self._with(replace(group, since=group.since if oldest is None else oldest, outcome=outcome))
        return self if self.late(found.groups, self.version + self.updating) is not None else found

    @property
    def ready(self) -> list[Group]:
        """Groups that have ended, by deadline, earliest first."""
        return sorted((one for one in self.groups if one.outcome is not None), key=attrgetter("since", "ordinal"))

    def take(self) -> Batch | NotReady:
        """Take the batch of the next step, the ready groups that are due first; or return the reason for waiting.

        With `draw_size` groups without a place are CANCELLED once no group runs: no later batch could take them.
        """
        size = self.settings.batch_size
        if self.updating or self.step >= self.settings.last_step:
            raise RuntimeError(f"no batch can be taken after step {self.step} (updating: {self.updating})")
        ready = self.ready
        running = [one for one in self.groups if one.outcome is None]
        if len(ready) < size:
            return NotReady(tuple(one.ordinal for one in running))
        taken = {one.ordinal: one for one in sorted(ready[:size], key=attrgetter("ordinal"))}
        rest = tuple(one for one in self.groups if one.ordinal not in taken)
        statuses = {ordinal: PROMPT_STATUSES[one.outcome] for ordinal, one in taken.items() if one.outcome is not None}
        late = self.late(rest, self.version + 1)
        if late is not None:
            due = tuple(one.ordinal for one in running if one.since <= late)
            if due or self.settings.draw_size is None:
                return NotReady(due)
            statuses |= {one.ordinal: PromptStatus.CANCELLED for one in rest}
            rest = ()
        return Batch(
            replace(self, step=self.step + 1, updating=True, groups=rest, left=()),
            dict(sorted([*statuses.items(), *self.left])),
            tuple(taken),
        )

    def replay(self, statuses: Mapping[int, PromptStatus]) -> Batch:
        """Take the batch that a process before took in this step, at the same version, of groups begun there."""
        begun = range(self.next_ordinal, max(self.next_ordinal, *(one + 1 for one in statuses)))
        groups = (*self.groups, *(Group(one, self.served) for one in begun))
        rest = tuple(one for one in groups if one.ordinal not in statuses)
        if (
            self.updating
            or len(groups) - len(rest) + len(self.left) != len(statuses)
            or dict(self.left).keys() - statuses
        ):
            raise RuntimeError(f"step {self.step + 1} cannot take prompts {sorted(statuses)} again of {groups}")
        after = replace(self, step=self.step + 1, updating=True, groups=rest, left=(), next_ordinal=begun.stop)
        return Batch(after, dict(statuses), self.trained_of(statuses))

    def trained_of(self, statuses: Mapping[int, PromptStatus]) -> tuple[int, ...]:
        """Return which of a batch's statuses are of prompts in it; the others left before it."""
        return tuple(
            one for one in sorted(statuses) if statuses[one] is PromptStatus.TRAINED or not self.settings.replaces
        )

    @property
    def is_exhausted(self) -> bool:
        """More groups have left since the last batch was taken than may, or more were drawn for the next one."""
        if self.settings.most_left is not None and len(self.left) > self.settings.most_left:
            return True
        return self._is_drawn_out and not self.is_open and len(self.groups) < self.settings.batch_size

    @property
    def _is_drawn_out(self) -> bool:
        size, most = self.settings.draw_size, self.settings.most_draws
        return size is not None and most is not None and len(self.drawn) >= size * most

    def updated(self, version: int) -> StalenessScheduler:
        """End the update: the policy is `version` now, one more than before or, where it did not change, the same."""
        if not self.updating or not self.version <= version <= self.version + 1:
            raise RuntimeError(f"the update of step {self.step} made version {version} of {self.version}")
        return replace(self, version=version, updating=False)

    @property
    def publish_is_due(self) -> bool:
        """The engine's weights are old enough to be replaced."""
        return publish_lag(self.version, self.served) >= self.settings.publish_every

    def publish(self) -> StalenessScheduler:
        """Serve the policy's version from now on. A version may be served before it is due, e.g. for a validation."""
        if self.updating:
            raise RuntimeError(f"the update of step {self.step} has not ended: there is nothing to publish")
        return replace(self, served=self.version)

    def pause(self) -> StalenessScheduler:
        """Admit nothing until `resume`."""
        return replace(self, paused=True)

    def resume(self) -> StalenessScheduler:
        """Admit again."""
        return replace(self, paused=False)

    def cancel(self) -> tuple[StalenessScheduler, dict[int, PromptStatus]]:
        """End the run: prompts that no batch has taken are CANCELLED."""
        statuses = {group.ordinal: PromptStatus.CANCELLED for group in self.groups} | dict(self.left)
        return replace(self, groups=(), left=()), statuses

    def reset(self, ordinals: Collection[int]) -> StalenessScheduler:
        """Count open groups that do not run and were not reported, from the version served now on.

        After `restart` they count from the version of that state, and batches that were taken again made later ones.
        """
        groups = (replace(one, since=self.served) if one.ordinal in ordinals else one for one in self.groups)
        return replace(self, groups=tuple(groups))

    def restart(self, version: int) -> StalenessScheduler:
        """Continue in a new process without earlier samples: groups restart, with weights `version`."""
        groups = tuple(Group(group.ordinal, version) for group in self.groups)
        return replace(self, version=version, served=version, updating=False, paused=False, groups=groups)

    def state(self) -> dict[str, JSON]:
        """Return the state as JSON values for `load`; settings are not in it."""
        groups: list[JSON] = [[one.ordinal, one.since, one.outcome and one.outcome.value] for one in self.groups]
        left: list[JSON] = [[ordinal, status.value] for ordinal, status in self.left]
        return {
            "step": self.step,
            "version": self.version,
            "served": self.served,
            "next_ordinal": self.next_ordinal,
            "updating": self.updating,
            "paused": self.paused,
            "groups": groups,
            "left": left,
        }

    @staticmethod
    def load(settings: Settings, state: Mapping[str, JSON]) -> StalenessScheduler:
        """Make the state that `state()` was taken of. Raises TypeError for another form."""
        match state:
            case {
                "step": int(step),
                "version": int(version),
                "served": int(served),
                "next_ordinal": int(next_ordinal),
                "updating": bool(updating),
                "paused": bool(paused),
                "groups": list(found),
                "left": list(left),
            }:
                groups, gone = tuple(_group(one) for one in found), tuple(_prompt_status(one) for one in left)
                return StalenessScheduler(settings, step, version, served, next_ordinal, updating, paused, groups, gone)
        raise TypeError(f"expected the state of a schedule, found {state!r:.200}")

    def _place(self, ordinal: int) -> int:
        return bisect_left(self.groups, ordinal, key=attrgetter("ordinal"))

    def _open(self, ordinal: int) -> Group:
        place = self._place(ordinal)
        group = self.groups[place] if place < len(self.groups) else None
        if group is None or group.ordinal != ordinal or group.outcome is not None:
            raise RuntimeError(f"prompt {ordinal} is not open: {group}")
        return group

    def _without(self, group: Group, status: PromptStatus) -> StalenessScheduler:
        place = self._place(group.ordinal)
        rest = self.groups[:place] + self.groups[place + 1 :]
        return replace(self, groups=rest, left=(*self.left, (group.ordinal, status)))

    def _with(self, group: Group) -> StalenessScheduler:
        place = self._place(group.ordinal)
        return replace(self, groups=(*self.groups[:place], group, *self.groups[place + 1 :]))


def _group(found: JSON) -> Group:
    """Make a group of its JSON. Raises TypeError for another form."""
    match found:
        case [int(ordinal), int(since), None]:
            return Group(ordinal, since)
        case [int(ordinal), int(since), str(outcome)]:
            return Group(ordinal, since, GroupStatus(outcome))
    raise TypeError(f"expected [ordinal, version, outcome] of a group, found {found!r:.100}")


def _prompt_status(found: JSON) -> tuple[int, PromptStatus]:
    """Make the status of a prompt of its JSON. Raises TypeError for another form."""
    match found:
        case [int(ordinal), str(status)]:
            return ordinal, PromptStatus(status)
    raise TypeError(f"expected [ordinal, status], found {found!r:.100}")
