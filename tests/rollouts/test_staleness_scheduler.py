"""The schedule of prompts: all orders of events for small sizes, and random long ones for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import settings as tries
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.errors import TrainingError
from agentrl.rollouts.staleness_scheduler import (
    PROMPT_STATUSES,
    Batch,
    Group,
    GroupStatus,
    NotReady,
    PromptStatus,
    Settings,
    StalenessScheduler,
)
from tests.naming import naming

ENDLESS = 1 << 20


class ByNumber(StalenessScheduler):
    """Admits by the number of groups alone, whatever is served."""

    __slots__ = ()

    @property
    def can_admit(self) -> bool:
        return self.room > 0


class NextStepOnly(StalenessScheduler):
    """Takes a batch unless one of the rest would be too old in the very next step."""

    __slots__ = ()

    def late(self, groups: Iterable[Group], version: int) -> int | None:
        due = [one.since for one in groups if one.since + self.settings.max_staleness <= version]
        return due[self.settings.batch_size] if len(due) > self.settings.batch_size else None


def moves(schedule: StalenessScheduler) -> Iterator[StalenessScheduler]:
    """All states that one event leads to. Each prompt of the state is in the next one or has a final status.

    Groups that are alike stand for each other, so one of each kind moves. Left out is what leads nowhere else: a
    failed group that takes its place in a batch is one that is ready, and a pause only keeps admission from happening.
    """
    if schedule.can_admit:
        yield schedule.admit()
    for one in {(one.since, one.outcome): one for one in schedule.groups}.values():
        if one.outcome is not None:
            continue
        if one.since < schedule.served:
            yield schedule.begin(one.ordinal)
        outcomes = (GroupStatus.SCORED, GroupStatus.FAILED, GroupStatus.FILTERED)
        for outcome in outcomes[: 3 if schedule.settings.replaces else 2]:
            after, status = schedule.finish(one.ordinal, outcome, one.since)
            assert (status is PromptStatus.OPEN) == (one.ordinal in {other.ordinal for other in after.groups})
            assert status is PromptStatus.OPEN or dict(after.left)[one.ordinal] is status
            yield after
    if schedule.updating:
        yield schedule.updated(schedule.version)
        after = schedule.updated(schedule.version + 1)
        yield after.publish() if after.publish_is_due else after
        return
    if type(schedule) is StalenessScheduler:  # not one that admits what cannot be in time
        yield resumed(schedule)
    if schedule.served < schedule.version:
        yield schedule.publish()  # earlier than it is due, for a validation
    if schedule.step < schedule.settings.last_step and isinstance(taken := schedule.take(), Batch):
        before, rest = {one.ordinal for one in schedule.groups}, {one.ordinal for one in taken.schedule.groups}
        assert set(taken.ordinals) == before - rest and not taken.schedule.left
        assert taken.statuses.keys() == {*taken.ordinals, *dict(schedule.left)}
        assert len(taken.statuses) == len(taken.ordinals) + len(schedule.left) and list(taken.statuses) == sorted(
            taken.statuses
        )
        assert len(taken.ordinals) == schedule.settings.batch_size and PromptStatus.OPEN not in taken.statuses.values()
        assert taken.schedule == schedule.replay(taken.statuses).schedule and taken.ordinals == schedule.trained_of(
            taken.statuses
        )
        yield taken.schedule


def resumed(schedule: StalenessScheduler) -> StalenessScheduler:
    """Killed, and gone on with everything as old as it was."""
    after = schedule.restart(schedule.version)
    for one in schedule.groups:
        before, after = after, after.restore(one.ordinal, one.outcome, one.since)
        assert after is not before, "what was in time before a kill is in time after it"
    assert after.groups == schedule.groups
    return after


def normal(schedule: StalenessScheduler) -> StalenessScheduler:
    """The same state as far as the future goes: versions count from the policy's, ordinals from 0 by age."""
    by_age = sorted((one.since - schedule.version, one.outcome is not None) for one in schedule.groups)
    groups = tuple(Group(n, since, GroupStatus.SCORED if ended else None) for n, (since, ended) in enumerate(by_age))
    counted = 0 if schedule.settings.most_left is None else len(schedule.left)
    return replace(
        schedule,
        version=0,
        served=schedule.served - schedule.version,
        step=0 if schedule.settings.last_step == ENDLESS else schedule.step,
        next_ordinal=len(groups) + counted,
        groups=groups,
        left=tuple((len(groups) + n, PromptStatus.FILTERED) for n in range(counted)),
    )


def fault(schedule: StalenessScheduler) -> str | None:
    """What is wrong with a state: a group that every later update would use too late, or no way on."""
    settings = schedule.settings
    assert len(schedule.groups) <= (1 + settings.depth) * settings.batch_size
    assert len(schedule.groups) <= (settings.last_step - schedule.step) * settings.batch_size
    if schedule.is_exhausted:
        assert len(schedule.left) == settings.most_left + 1 if settings.most_left is not None else False
        return "is exhausted"
    if any(one.since + settings.max_staleness < schedule.version + schedule.updating for one in schedule.groups):
        return "above the bound"
    if schedule.updating or schedule.step == settings.last_step or schedule.can_admit:
        return None
    taken = schedule.take()
    return "stands still" if isinstance(taken, NotReady) and not taken.ordinals else None


def search(start: StalenessScheduler) -> tuple[set[str], int]:
    """(The faults of all states that can be reached, the number of states); none is looked for behind a fault."""
    seen, todo, faults = {start}, [start], set[str]()
    while todo:
        schedule = todo.pop()
        if (found := fault(schedule)) is not None:
            faults.add(found)
            continue
        new = {normal(after) for after in moves(schedule)} - seen
        seen |= new
        todo += new
    return faults, len(seen)


SIZES = [
    Settings(B, ENDLESS, K, D, T, replaces=True)  # in which failed groups may also leave: more can happen
    for B, K in product((1, 2), (0, 1, 2, 3))
    for D in (range(1, K + 1) if K else (0,))
    for T in range(1, K + 2)
]


def named(one: Settings) -> str:
    return f"B{one.batch_size}-K{one.max_staleness}-D{one.depth}-T{one.publish_every}"


@pytest.mark.slice(5, "matrix")
@pytest.mark.parametrize("settings", SIZES, ids=named)
def test_no_order_of_events_passes_the_bound_or_stands_still(settings: Settings) -> None:
    found, states = search(StalenessScheduler(settings))
    assert not found and states > 3 * settings.batch_size


@pytest.mark.slice(3, "matrix")
@pytest.mark.parametrize("settings", [replace(one, last_step=one.depth + 2) for one in SIZES], ids=named)
def test_the_last_steps_take_all_that_was_admitted(settings: Settings) -> None:
    found, states = search(StalenessScheduler(settings))
    assert not found and states > 3 * settings.batch_size


@pytest.mark.parametrize("most", [0, 2])
@pytest.mark.parametrize("settings", [Settings(1, ENDLESS, 1, 1), Settings(2, 3, 2, 2)], ids=named)
def test_no_more_groups_are_replaced_than_may_be(settings: Settings, most: int) -> None:
    """Nothing else goes wrong before that."""
    assert search(StalenessScheduler(replace(settings, replaces=True, most_left=most)))[0] == {"is exhausted"}


@pytest.mark.parametrize("settings", [Settings(1, ENDLESS, 1, 1), Settings(2, ENDLESS, 2, 1, 3)], ids=named)
def test_admission_by_number_alone_stands_still(settings: Settings) -> None:
    """While an update runs, or between two publications, what begins is due sooner than batches can take it."""
    assert "stands still" in search(ByNumber(settings))[0]


def test_looking_one_step_ahead_passes_the_bound() -> None:
    assert search(NextStepOnly(Settings(2, ENDLESS, 2, 2)))[0]


def test_oldest_by_ordinal_stands_still() -> None:
    """A prompt that was admitted first may begin last, and be due last."""
    schedule = StalenessScheduler(Settings(1, ENDLESS, 1, 1)).admit().admit().finish(1, GroupStatus.SCORED, 0)[0]
    schedule = replace(schedule, version=1, served=1).begin(0).finish(0, GroupStatus.SCORED, 1)[0]
    taken = schedule.take()
    assert isinstance(taken, Batch) and list(taken.statuses) == [1], "after 0 it would be too old, and 0 can wait"


def test_the_batch_is_of_those_that_are_due_first_and_lists_them_by_ordinal() -> None:
    schedule = StalenessScheduler(Settings(2, 9, 2, 2), served=3, version=3)
    schedule = replace(
        schedule,
        groups=(Group(0, 3, GroupStatus.SCORED), Group(1, 2, GroupStatus.FAILED), Group(2, 1, GroupStatus.SCORED)),
    )
    batch = schedule.take()
    assert isinstance(batch, Batch)
    assert list(batch.statuses.items()) == [(1, PromptStatus.FAILED), (2, PromptStatus.TRAINED)]
    assert [one.ordinal for one in batch.schedule.groups] == [0]


def test_it_waits_for_those_that_are_due() -> None:
    schedule = StalenessScheduler(Settings(1, 9, 1, 1), version=4, served=4)
    schedule = replace(schedule, groups=(Group(7, 4, GroupStatus.SCORED), Group(8, 3)), next_ordinal=9)
    assert schedule.take() == NotReady((8,)), "in the next step it would be two versions old"
    schedule, status = schedule.finish(8, GroupStatus.TIMEOUT, None)
    taken = schedule.take()
    assert status is PromptStatus.OPEN and isinstance(taken, Batch) and taken.statuses == {8: PromptStatus.TIMEOUT}


@pytest.mark.parametrize("size, drawn", [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_prompts_that_begin_together_fill_a_batch_and_what_it_has_no_place_for_leaves(size: int, drawn: int) -> None:
    for outcomes in product((GroupStatus.SCORED, GroupStatus.FILTERED, GroupStatus.FAILED), repeat=2 * drawn):
        schedule = StalenessScheduler(Settings(size, ENDLESS, replaces=True, draw_size=drawn), version=4, served=4)
        ended: list[GroupStatus] = []
        while len(ended) < len(outcomes) and isinstance(schedule.take(), NotReady):
            for _ in range(schedule.room):
                schedule = schedule.admit()
            assert len(schedule.groups) <= size - 1 + drawn
            for ordinal in range(len(ended), len(ended) + drawn):
                assert schedule.take() == NotReady(tuple(range(ordinal, schedule.next_ordinal))), "until all have ended"
                assert not schedule.can_admit, "none begins while one is open"
                schedule, _ = schedule.finish(ordinal, outcomes[ordinal], None)
            ended = [*outcomes[: schedule.next_ordinal]]
        scored = [ordinal for ordinal, outcome in enumerate(ended) if outcome is GroupStatus.SCORED]
        taken = schedule.take()
        if len(scored) < size:
            assert taken == NotReady(()) and [one.ordinal for one in schedule.groups] == scored
            continue
        assert isinstance(taken, Batch) and list(taken.ordinals) == scored[:size], "the first ones"
        lost = {
            ordinal: PROMPT_STATUSES[outcome]
            for ordinal, outcome in enumerate(ended)
            if outcome is not GroupStatus.SCORED
        }
        surplus = dict.fromkeys(scored[size:], PromptStatus.CANCELLED)
        assert taken.statuses == lost | surplus | dict.fromkeys(scored[:size], PromptStatus.TRAINED), (
            "each prompt has one status"
        )
        assert not taken.schedule.groups and not taken.schedule.left and taken.schedule.updating


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bound", [1, 2])
def test_late_groups_are_those_whose_batch_comes_after_their_deadline(size: int, bound: int) -> None:
    """Counting groups of one deadline together is the same as placing each."""
    schedule = StalenessScheduler(Settings(size, ENDLESS, bound, 1))
    for number in range(6):
        for ages in product(range(4), repeat=number):
            groups = [Group(ordinal, since) for ordinal, since in enumerate(ages)]
            placed = enumerate(sorted(ages))
            first = next((since for place, since in placed if since + bound < 3 + place // size), None)
            assert schedule.late(groups, 3) == first


@pytest.mark.parametrize("K, D, T", [(0, 1, 1), (2, 0, 1), (2, 3, 1), (-1, 0, 1), (1, 1, 3), (1, 1, 0), (0, 0, 2)])
def test_settings_that_cannot_hold_are_refused(K: int, D: int, T: int) -> None:
    with pytest.raises(ValueError, match=r"expected|max_staleness"):
        Settings(4, 9, K, D, T)
    with pytest.raises(ValueError, match=r"draw_size is 3; expected 1 or more, with max_staleness=0"):
        Settings(4, 9, 1, 1, draw_size=3)


def test_what_cannot_happen_is_refused() -> None:
    schedule = StalenessScheduler(Settings(1, 1)).admit()
    for wrong in (
        schedule.admit,
        StalenessScheduler(Settings(2, 9)).admit().admit().admit,
        lambda: schedule.finish(3, GroupStatus.SCORED, 0),
        lambda: schedule.updated(1),
        lambda: schedule.begin(1),
        lambda: replace(schedule, updating=True).publish(),
        lambda: replace(schedule, step=1).take(),
    ):
        with pytest.raises(RuntimeError):
            wrong()
    with naming(TrainingError, "version 1"):
        schedule.finish(0, GroupStatus.SCORED, 1)
    with pytest.raises(TypeError, match="a schedule"):
        StalenessScheduler.load(schedule.settings, schedule.state() | {"step": "1"})
    with naming(TypeError, "group"):
        StalenessScheduler.load(schedule.settings, schedule.state() | {"groups": [[1, 2]]})


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, for sizes that no search covers; every prompt's status is kept beside the schedule."""

    @initialize(
        size=st.integers(1, 5), bound=st.integers(0, 5), data=st.data(), replaces=st.booleans(), last=st.integers(1, 30)
    )
    def begin(self, size: int, bound: int, data: st.DataObject, replaces: bool, last: int) -> None:
        depth = data.draw(st.integers(min(bound, 1), bound))
        every = data.draw(st.integers(1, bound + 1))
        self.settings = Settings(size, last, bound, depth, every, replaces)
        self.schedule = StalenessScheduler(self.settings)
        self.statuses: dict[int, PromptStatus] = {}
        self.batches: list[list[int]] = []
        self.save()

    @precondition(lambda self: not self.schedule.updating)
    @rule()
    def save(self) -> None:
        """Make a checkpoint, behind which batches are taken again."""
        self.saved = self.schedule
        self.taken: list[tuple[int, dict[int, PromptStatus]]] = []
        """Version and statuses of the batches since."""

    @precondition(lambda self: self.schedule.can_admit)
    @rule(most=st.integers(1, 30))
    def admit(self, most: int) -> None:
        while self.schedule.can_admit and (most := most - 1) >= 0:
            self.statuses[self.schedule.next_ordinal] = PromptStatus.OPEN
            self.schedule = self.schedule.admit()

    @precondition(lambda self: any(one.outcome is None for one in self.schedule.groups))
    @rule(data=st.data(), outcome=st.sampled_from(list(GroupStatus)), count=st.integers(1, 8))
    def finish(self, data: st.DataObject, outcome: GroupStatus, count: int) -> None:
        if outcome is GroupStatus.FILTERED and not self.settings.replaces:
            outcome = GroupStatus.SCORED
        for _ in range(count):
            left = [one for one in self.schedule.groups if one.outcome is None]
            if not left:
                return
            group = data.draw(st.sampled_from(left))
            oldest = data.draw(st.none() | st.integers(group.since, self.schedule.version))
            self.schedule, status = self.schedule.finish(group.ordinal, outcome, oldest)
            self.settle({group.ordinal: status} if status is not PromptStatus.OPEN else {})

    @precondition(lambda self: any(one.outcome is None for one in self.schedule.groups))
    @rule(data=st.data())
    def begin_one(self, data: st.DataObject) -> None:
        self.schedule = self.schedule.begin(
            data.draw(st.sampled_from([one.ordinal for one in self.schedule.groups if one.outcome is None]))
        )

    @precondition(lambda self: not self.schedule.updating and self.schedule.step < self.settings.last_step)
    @rule()
    def take(self) -> None:
        taken = self.schedule.take()
        if isinstance(taken, Batch):
            ages = [self.schedule.version - one.since for one in self.schedule.groups if one.ordinal in taken.statuses]
            assert max(ages) <= self.settings.max_staleness
            self.batches.append(list(taken.ordinals))
            self.taken.append((self.schedule.version, taken.statuses))
            left = dict(self.schedule.left)
            assert {one: taken.statuses[one] for one in left} == left
            self.schedule = taken.schedule
            self.settle({one: taken.statuses[one] for one in taken.ordinals})

    @precondition(lambda self: self.schedule.updating)
    @rule(changes=st.integers(0, 5))
    def update(self, changes: int) -> None:
        self.schedule = self.schedule.updated(self.schedule.version + min(changes, 1))
        if self.schedule.publish_is_due:
            self.schedule = self.schedule.publish()

    @precondition(lambda self: not self.schedule.updating)
    @rule()
    def validate(self) -> None:
        self.schedule = self.schedule.publish().pause()
        assert not self.schedule.can_admit
        self.schedule = self.schedule.resume()

    @rule()
    def write_and_read(self) -> None:
        assert StalenessScheduler.load(self.settings, self.schedule.state()) == self.schedule

    @precondition(lambda self: not self.schedule.updating)
    @rule()
    def begin_anew_in_a_new_process(self) -> None:
        ordinals = [one.ordinal for one in self.schedule.groups]
        left = self.schedule.left
        self.schedule = StalenessScheduler.load(self.settings, self.schedule.state()).restart(self.schedule.version)
        assert self.schedule.left == left and [one.ordinal for one in self.schedule.groups] == ordinals

    @precondition(lambda self: not self.schedule.updating)
    @rule(data=st.data())
    def go_on_in_a_new_process(self, data: st.DataObject) -> None:
        """From a checkpoint after which some were begun. Of some that were open nothing had been sampled yet."""
        schedule, groups = self.schedule, {one.ordinal: one for one in self.schedule.groups}
        before = {*groups, *dict(schedule.left)}
        begun_later = data.draw(st.integers(0, len(before))) if schedule.settings.max_staleness else 0
        first = sorted(before)[len(before) - begun_later] if begun_later else schedule.next_ordinal
        if any(ordinal not in before for ordinal in range(first, schedule.next_ordinal)):
            return  # others of them are in batches, which are taken again first
        known = tuple(one for one in schedule.groups if one.ordinal < first)
        left = tuple(one for one in schedule.left if one[0] < first)
        state = replace(schedule, groups=known, left=left, next_ordinal=first).restart(schedule.version)
        for ordinal in (*(one.ordinal for one in known), *range(first, schedule.next_ordinal)):
            if ordinal >= first:
                state = state.admit()
            found, status = groups.get(ordinal), dict(schedule.left).get(ordinal)
            if found is None:
                state = state.restore(ordinal, next(one for one, its in PROMPT_STATUSES.items() if its is status), None)
            elif found.outcome is not None or data.draw(st.booleans()):
                resumed = state.restore(ordinal, found.outcome, found.since)
                assert resumed is not state, "what was in time before a kill is in time after it"
                state = resumed
        assert [one.ordinal for one in state.groups] == list(groups) and dict(state.left) == dict(schedule.left)
        self.schedule = state

    @precondition(lambda self: not self.schedule.updating and self.settings.max_staleness)
    @rule()
    def go_on_behind_batches_that_are_taken_again(self) -> None:
        """Everything is recorded, and groups of the checkpoint may have begun anew since in a process before."""
        state = self.saved.restart(self.saved.version)
        versions = [*(version for version, _ in self.taken), self.schedule.version][1:]
        for (_, statuses), version in zip(self.taken, versions, strict=True):
            state = state.replay(statuses).schedule.updated(version)
            if state.publish_is_due:
                state = state.publish()
        if state.served < self.schedule.served:
            return  # what it publishes comes at other versions than before
        state = state.reset([one.ordinal for one in state.groups])
        groups, left = {one.ordinal: one for one in self.schedule.groups}, dict(self.schedule.left)
        known = [one.ordinal for one in state.groups]
        for ordinal in (*known, *range(state.next_ordinal, self.schedule.next_ordinal)):
            if ordinal not in known:
                state = state.admit()
            if (found := groups.get(ordinal)) is not None:
                resumed = state.restore(ordinal, found.outcome, found.since)
                assert resumed is not state, "what was in time before a kill is in time after it"
                state = resumed
            else:
                state = state.restore(
                    ordinal, next(one for one, its in PROMPT_STATUSES.items() if its is left[ordinal]), None
                )
        assert state.groups == self.schedule.groups and dict(state.left) == left
        self.schedule = state

    def settle(self, statuses: dict[int, PromptStatus]) -> None:
        for ordinal, status in statuses.items():
            assert self.statuses[ordinal] is PromptStatus.OPEN is not status, "a final status stays"
            self.statuses[ordinal] = status

    @invariant()
    def every_prompt_has_one_fate_and_the_rest_can_be_in_time(self) -> None:
        if not hasattr(self, "schedule"):
            return
        open_ones = [ordinal for ordinal, status in self.statuses.items() if status is PromptStatus.OPEN]
        assert open_ones == [one.ordinal for one in self.schedule.groups]
        assert list(self.statuses) == list(range(self.schedule.next_ordinal))
        assert all(len(batch) == self.settings.batch_size for batch in self.batches)
        counted = Counter(ordinal for batch in self.batches for ordinal in batch)
        assert not counted or max(counted.values()) == 1
        assert len(open_ones) <= (1 + self.settings.depth) * self.settings.batch_size
        assert self.schedule.late(self.schedule.groups, self.schedule.version + self.schedule.updating) is None

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            self.run_to_the_end()
            left = dict(self.schedule.left)
            self.schedule, statuses = self.schedule.cancel()
            assert {one: self.statuses[one] for one in left} == left == {one: statuses.pop(one) for one in left}
            self.settle(statuses)
            assert PromptStatus.OPEN not in self.statuses.values()

    def run_to_the_end(self) -> None:
        """From here on everything goes well: no state stands still, and what was admitted is all taken."""
        while True:
            while self.schedule.can_admit:
                self.admit(1)
            for one in self.schedule.groups:
                if one.outcome is None:
                    self.schedule, _ = self.schedule.finish(one.ordinal, GroupStatus.SCORED, None)
            if self.schedule.updating:
                self.update(1)
            elif self.schedule.step == self.settings.last_step:
                assert not self.schedule.groups
                return
            else:
                before = self.schedule.step
                self.take()
                assert self.schedule.step == before + 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = tries(max_examples=15, stateful_step_count=30, deadline=None)


def test_batches_of_a_process_before_are_taken_again_and_what_had_ended_is_ready() -> None:
    schedule = StalenessScheduler(
        Settings(2, 9, 2, 2), step=3, version=3, served=3, next_ordinal=8, groups=(Group(6, 3), Group(7, 3))
    )
    again = schedule.replay({7: PromptStatus.TRAINED, 9: PromptStatus.TRAINED}).schedule
    assert (again.step, again.updating, again.next_ordinal) == (4, True, 10)
    assert [one.ordinal for one in again.groups] == [6, 8], "8 was begun when 9 was"
    with naming(RuntimeError, "step 4"):
        schedule.replay(dict.fromkeys([5, 6], PromptStatus.TRAINED))
    with pytest.raises(RuntimeError, match="step 5 cannot take"):
        again.replay(dict.fromkeys([6, 8], PromptStatus.TRAINED))
    schedule = again.updated(4).publish()
    ready = schedule.restore(6, GroupStatus.SCORED, 3)
    assert [(one.ordinal, one.since) for one in ready.ready] == [(6, 3)]
    assert schedule.restore(6, GroupStatus.SCORED, 1) is schedule, "too old for the batch at version 4"
    assert schedule.restore(6, None, 1) is schedule and schedule.restore(6, None, 2) is not schedule
    assert schedule.restore(6, None, 2).groups[0] == Group(6, 2), "it goes on, as old as what it has sampled"
    assert ready.restore(8, GroupStatus.FAILED, None).ready[-1].outcome is GroupStatus.FAILED
    replacing = replace(ready, settings=replace(ready.settings, replaces=True)).restore(8, GroupStatus.FILTERED, None)
    assert [one.ordinal for one in replacing.groups] == [6] and replacing.left == ((8, PromptStatus.FILTERED),)


def test_a_group_that_begins_anew_is_not_as_old_as_it_was() -> None:
    schedule = replace(StalenessScheduler(Settings(1, 9, 3, 3)).admit(), version=3, served=2)
    assert [schedule.begin(0, told).groups[0].since for told in (0, 1, 3)] == [0, 1, 2]
    assert schedule.begin(0).begin(0, 1).groups[0].since == 2, "what was told late makes nothing older"
