"""The flow of prompts: all orders of events for small sizes, and random long ones for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import settings as tries
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.rollouts.flow import FATES, Batch, Fate, Flow, Group, Outcome, Settings, Wait

ENDLESS = 1 << 20


class ByNumber(Flow):
    """Admits by the number of groups alone, whatever is served."""

    __slots__ = ()

    @property
    def can_admit(self) -> bool:
        return self.room > 0


class NextStepOnly(Flow):
    """Takes a batch unless one of the rest would be too old in the very next step."""

    __slots__ = ()

    def late(self, groups: Iterable[Group], version: int) -> int | None:
        due = [one.since for one in groups if one.since + self.settings.max_staleness <= version]
        return due[self.settings.batch_size] if len(due) > self.settings.batch_size else None


def moves(flow: Flow) -> Iterator[Flow]:
    """All states that one event leads to. Each prompt of the state is in the next one or has a final fate.

    Groups that are alike stand for each other, so one of each kind moves. Left out is what leads nowhere else: a
    failed group that takes its place in a batch is one that is ready, and a pause only keeps admission from happening.
    """
    if flow.can_admit:
        yield flow.admit()
    for one in {(one.since, one.outcome): one for one in flow.groups}.values():
        if one.outcome is not None:
            continue
        if one.since < flow.served:
            yield flow.begin(one.ordinal)
        outcomes = (Outcome.SCORED, Outcome.FAILED, Outcome.FILTERED)
        for outcome in outcomes[: 3 if flow.settings.replaces else 2]:
            after, fate = flow.finish(one.ordinal, outcome, one.since)
            assert (fate is Fate.OPEN) == (one.ordinal in {other.ordinal for other in after.groups})
            assert fate is Fate.OPEN or dict(after.left)[one.ordinal] is fate
            yield after
    if flow.updating:
        yield flow.updated(flow.version)
        after = flow.updated(flow.version + 1)
        yield after.publish() if after.publish_is_due else after
        return
    if type(flow) is Flow:  # not one that admits what cannot be in time
        yield resumed(flow)
    if flow.served < flow.version:
        yield flow.publish()  # earlier than it is due, for a validation
    if flow.step < flow.settings.last_step and isinstance(taken := flow.take(), Batch):
        before, rest = {one.ordinal for one in flow.groups}, {one.ordinal for one in taken.flow.groups}
        assert set(taken.ordinals) == before - rest and not taken.flow.left
        assert taken.fates.keys() == {*taken.ordinals, *dict(flow.left)}
        assert len(taken.fates) == len(taken.ordinals) + len(flow.left) and list(taken.fates) == sorted(taken.fates)
        assert len(taken.ordinals) == flow.settings.batch_size and Fate.OPEN not in taken.fates.values()
        assert taken.flow == flow.repeat(taken.fates).flow and taken.ordinals == flow.trained_of(taken.fates)
        yield taken.flow


def resumed(flow: Flow) -> Flow:
    """Killed, and gone on with everything as old as it was."""
    after = flow.restart(flow.version)
    for one in flow.groups:
        before, after = after, after.recall(one.ordinal, one.outcome, one.since)
        assert after is not before, "what was in time before a kill is in time after it"
    assert after.groups == flow.groups
    return after


def normal(flow: Flow) -> Flow:
    """The same state as far as the future goes: versions count from the policy's, ordinals from 0 by age."""
    by_age = sorted((one.since - flow.version, one.outcome is not None) for one in flow.groups)
    groups = tuple(Group(n, since, Outcome.SCORED if ended else None) for n, (since, ended) in enumerate(by_age))
    counted = 0 if flow.settings.most_left is None else len(flow.left)
    return replace(
        flow,
        version=0,
        served=flow.served - flow.version,
        step=0 if flow.settings.last_step == ENDLESS else flow.step,
        next_ordinal=len(groups) + counted,
        groups=groups,
        left=tuple((len(groups) + n, Fate.FILTERED) for n in range(counted)),
    )


def fault(flow: Flow) -> str | None:
    """What is wrong with a state: a group that every later update would use too late, or no way on."""
    settings = flow.settings
    assert len(flow.groups) <= (1 + settings.depth) * settings.batch_size
    assert len(flow.groups) <= (settings.last_step - flow.step) * settings.batch_size
    if flow.is_exhausted:
        assert len(flow.left) == settings.most_left + 1 if settings.most_left is not None else False
        return "is exhausted"
    if any(one.since + settings.max_staleness < flow.version + flow.updating for one in flow.groups):
        return "above the bound"
    if flow.updating or flow.step == settings.last_step or flow.can_admit:
        return None
    taken = flow.take()
    return "stands still" if isinstance(taken, Wait) and not taken.ordinals else None


def search(start: Flow) -> tuple[set[str], int]:
    """(The faults of all states that can be reached, the number of states); none is looked for behind a fault."""
    seen, todo, faults = {start}, [start], set[str]()
    while todo:
        flow = todo.pop()
        if (found := fault(flow)) is not None:
            faults.add(found)
            continue
        new = {normal(after) for after in moves(flow)} - seen
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
    found, states = search(Flow(settings))
    assert not found and states > 3 * settings.batch_size


@pytest.mark.slice(3, "matrix")
@pytest.mark.parametrize("settings", [replace(one, last_step=one.depth + 2) for one in SIZES], ids=named)
def test_the_last_steps_take_all_that_was_admitted(settings: Settings) -> None:
    found, states = search(Flow(settings))
    assert not found and states > 3 * settings.batch_size


@pytest.mark.parametrize("most", [0, 2])
@pytest.mark.parametrize("settings", [Settings(1, ENDLESS, 1, 1), Settings(2, 3, 2, 2)], ids=named)
def test_no_more_groups_are_replaced_than_may_be(settings: Settings, most: int) -> None:
    """Nothing else goes wrong before that."""
    assert search(Flow(replace(settings, replaces=True, most_left=most)))[0] == {"is exhausted"}


@pytest.mark.parametrize("settings", [Settings(1, ENDLESS, 1, 1), Settings(2, ENDLESS, 2, 1, 3)], ids=named)
def test_admission_by_number_alone_stands_still(settings: Settings) -> None:
    """While an update runs, or between two publications, what begins is due sooner than batches can take it."""
    assert "stands still" in search(ByNumber(settings))[0]


def test_looking_one_step_ahead_passes_the_bound() -> None:
    assert search(NextStepOnly(Settings(2, ENDLESS, 2, 2)))[0]


def test_oldest_by_ordinal_stands_still() -> None:
    """A prompt that was admitted first may begin last, and be due last."""
    flow = Flow(Settings(1, ENDLESS, 1, 1)).admit().admit().finish(1, Outcome.SCORED, 0)[0]
    flow = replace(flow, version=1, served=1).begin(0).finish(0, Outcome.SCORED, 1)[0]
    taken = flow.take()
    assert isinstance(taken, Batch) and list(taken.fates) == [1], "after 0 it would be too old, and 0 can wait"


def test_the_batch_is_of_those_that_are_due_first_and_lists_them_by_ordinal() -> None:
    flow = Flow(Settings(2, 9, 2, 2), served=3, version=3)
    flow = replace(flow, groups=(Group(0, 3, Outcome.SCORED), Group(1, 2, Outcome.FAILED), Group(2, 1, Outcome.SCORED)))
    batch = flow.take()
    assert isinstance(batch, Batch)
    assert list(batch.fates.items()) == [(1, Fate.FAILED), (2, Fate.TRAINED)]
    assert [one.ordinal for one in batch.flow.groups] == [0]


def test_it_waits_for_those_that_are_due() -> None:
    flow = Flow(Settings(1, 9, 1, 1), version=4, served=4)
    flow = replace(flow, groups=(Group(7, 4, Outcome.SCORED), Group(8, 3)), next_ordinal=9)
    assert flow.take() == Wait((8,)), "in the next step it would be two versions old"
    flow, fate = flow.finish(8, Outcome.TIMEOUT, None)
    taken = flow.take()
    assert fate is Fate.OPEN and isinstance(taken, Batch) and taken.fates == {8: Fate.TIMEOUT}


@pytest.mark.parametrize("size, at_once", [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_prompts_that_begin_together_fill_a_batch_and_what_it_has_no_place_for_leaves(size: int, at_once: int) -> None:
    for outcomes in product((Outcome.SCORED, Outcome.FILTERED, Outcome.FAILED), repeat=2 * at_once):
        flow = Flow(Settings(size, ENDLESS, replaces=True, at_once=at_once), version=4, served=4)
        ended: list[Outcome] = []
        while len(ended) < len(outcomes) and isinstance(flow.take(), Wait):
            flow = flow.admit(flow.room)
            assert len(flow.groups) <= size - 1 + at_once
            for ordinal in range(len(ended), len(ended) + at_once):
                assert flow.take() == Wait(tuple(range(ordinal, flow.next_ordinal))), "until all have ended"
                assert not flow.can_admit, "none begins while one is open"
                flow, _ = flow.finish(ordinal, outcomes[ordinal], None)
            ended = [*outcomes[: flow.next_ordinal]]
        scored = [ordinal for ordinal, outcome in enumerate(ended) if outcome is Outcome.SCORED]
        taken = flow.take()
        if len(scored) < size:
            assert taken == Wait(()) and [one.ordinal for one in flow.groups] == scored
            continue
        assert isinstance(taken, Batch) and list(taken.ordinals) == scored[:size], "the first ones"
        lost = {ordinal: FATES[outcome] for ordinal, outcome in enumerate(ended) if outcome is not Outcome.SCORED}
        surplus = dict.fromkeys(scored[size:], Fate.CANCELLED)
        assert taken.fates == lost | surplus | dict.fromkeys(scored[:size], Fate.TRAINED), "each prompt has one fate"
        assert not taken.flow.groups and not taken.flow.left and taken.flow.updating


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bound", [1, 2])
def test_late_groups_are_those_whose_batch_comes_after_their_deadline(size: int, bound: int) -> None:
    """Counting groups of one deadline together is the same as placing each."""
    flow = Flow(Settings(size, ENDLESS, bound, 1))
    for number in range(6):
        for ages in product(range(4), repeat=number):
            groups = [Group(ordinal, since) for ordinal, since in enumerate(ages)]
            placed = enumerate(sorted(ages))
            first = next((since for place, since in placed if since + bound < 3 + place // size), None)
            assert flow.late(groups, 3) == first


@pytest.mark.parametrize("K, D, T", [(0, 1, 1), (2, 0, 1), (2, 3, 1), (-1, 0, 1), (1, 1, 3), (1, 1, 0), (0, 0, 2)])
def test_settings_that_cannot_hold_are_refused(K: int, D: int, T: int) -> None:
    with pytest.raises(ValueError, match=r"expected|max_staleness"):
        Settings(4, 9, K, D, T)
    with pytest.raises(ValueError, match=r"at_once is 3; expected 1 or more, with max_staleness=0"):
        Settings(4, 9, 1, 1, at_once=3)


def test_what_cannot_happen_is_refused() -> None:
    flow = Flow(Settings(1, 1)).admit()
    for wrong in (
        flow.admit,
        lambda: Flow(Settings(2, 9, 1, 1)).admit(2),
        lambda: Flow(Settings(2, 9)).admit(3),
        lambda: flow.finish(3, Outcome.SCORED, 0),
        lambda: flow.finish(0, Outcome.SCORED, 1),
        lambda: flow.updated(1),
        lambda: flow.begin(1),
        lambda: replace(flow, updating=True).publish(),
        lambda: replace(flow, step=1).take(),
    ):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(TypeError, match="a flow"):
        Flow.load(flow.settings, flow.state() | {"step": "1"})
    with pytest.raises(TypeError, match="of a group"):
        Flow.load(flow.settings, flow.state() | {"groups": [[1, 2]]})


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, for sizes that no search covers; every prompt's fate is kept beside the flow."""

    @initialize(
        size=st.integers(1, 5), bound=st.integers(0, 5), data=st.data(), replaces=st.booleans(), last=st.integers(1, 30)
    )
    def begin(self, size: int, bound: int, data: st.DataObject, replaces: bool, last: int) -> None:
        depth = data.draw(st.integers(min(bound, 1), bound))
        every = data.draw(st.integers(1, bound + 1))
        self.settings = Settings(size, last, bound, depth, every, replaces)
        self.flow = Flow(self.settings)
        self.fates: dict[int, Fate] = {}
        self.batches: list[list[int]] = []
        self.save()

    @precondition(lambda self: not self.flow.updating)
    @rule()
    def save(self) -> None:
        """Make a checkpoint, behind which batches are taken again."""
        self.saved = self.flow
        self.taken: list[tuple[int, dict[int, Fate]]] = []
        """Version and fates of the batches since."""

    @precondition(lambda self: self.flow.can_admit)
    @rule(most=st.integers(1, 30))
    def admit(self, most: int) -> None:
        while self.flow.can_admit and (most := most - 1) >= 0:
            self.fates[self.flow.next_ordinal] = Fate.OPEN
            self.flow = self.flow.admit()

    @precondition(lambda self: any(one.outcome is None for one in self.flow.groups))
    @rule(data=st.data(), outcome=st.sampled_from(list(Outcome)), count=st.integers(1, 8))
    def finish(self, data: st.DataObject, outcome: Outcome, count: int) -> None:
        if outcome is Outcome.FILTERED and not self.settings.replaces:
            outcome = Outcome.SCORED
        for _ in range(count):
            left = [one for one in self.flow.groups if one.outcome is None]
            if not left:
                return
            group = data.draw(st.sampled_from(left))
            oldest = data.draw(st.none() | st.integers(group.since, self.flow.version))
            self.flow, fate = self.flow.finish(group.ordinal, outcome, oldest)
            self.settle({group.ordinal: fate} if fate is not Fate.OPEN else {})

    @precondition(lambda self: any(one.outcome is None for one in self.flow.groups))
    @rule(data=st.data())
    def begin_one(self, data: st.DataObject) -> None:
        self.flow = self.flow.begin(
            data.draw(st.sampled_from([one.ordinal for one in self.flow.groups if one.outcome is None]))
        )

    @precondition(lambda self: not self.flow.updating and self.flow.step < self.settings.last_step)
    @rule()
    def take(self) -> None:
        taken = self.flow.take()
        if isinstance(taken, Batch):
            ages = [self.flow.version - one.since for one in self.flow.groups if one.ordinal in taken.fates]
            assert max(ages) <= self.settings.max_staleness
            self.batches.append(list(taken.ordinals))
            self.taken.append((self.flow.version, taken.fates))
            left = dict(self.flow.left)
            assert {one: taken.fates[one] for one in left} == left
            self.flow = taken.flow
            self.settle({one: taken.fates[one] for one in taken.ordinals})

    @precondition(lambda self: self.flow.updating)
    @rule(changes=st.integers(0, 5))
    def update(self, changes: int) -> None:
        self.flow = self.flow.updated(self.flow.version + min(changes, 1))
        if self.flow.publish_is_due:
            self.flow = self.flow.publish()

    @precondition(lambda self: not self.flow.updating)
    @rule()
    def validate(self) -> None:
        self.flow = self.flow.publish().pause()
        assert not self.flow.can_admit
        self.flow = self.flow.go_on()

    @rule()
    def write_and_read(self) -> None:
        assert Flow.load(self.settings, self.flow.state()) == self.flow

    @precondition(lambda self: not self.flow.updating)
    @rule()
    def begin_anew_in_a_new_process(self) -> None:
        ordinals = [one.ordinal for one in self.flow.groups]
        left = self.flow.left
        self.flow = Flow.load(self.settings, self.flow.state()).restart(self.flow.version)
        assert self.flow.left == left and [one.ordinal for one in self.flow.groups] == ordinals

    @precondition(lambda self: not self.flow.updating)
    @rule(data=st.data())
    def go_on_in_a_new_process(self, data: st.DataObject) -> None:
        """From a checkpoint after which some were begun. Of some that were open nothing had been sampled yet."""
        flow, groups = self.flow, {one.ordinal: one for one in self.flow.groups}
        before = {*groups, *dict(flow.left)}
        begun_later = data.draw(st.integers(0, len(before))) if flow.settings.max_staleness else 0
        first = sorted(before)[len(before) - begun_later] if begun_later else flow.next_ordinal
        if any(ordinal not in before for ordinal in range(first, flow.next_ordinal)):
            return  # others of them are in batches, which are taken again first
        known = tuple(one for one in flow.groups if one.ordinal < first)
        left = tuple(one for one in flow.left if one[0] < first)
        state = replace(flow, groups=known, left=left, next_ordinal=first).restart(flow.version)
        for ordinal in (*(one.ordinal for one in known), *range(first, flow.next_ordinal)):
            if ordinal >= first:
                state = state.admit()
            found, fate = groups.get(ordinal), dict(flow.left).get(ordinal)
            if found is None:
                state = state.recall(ordinal, next(one for one, its in FATES.items() if its is fate), None)
            elif found.outcome is not None or data.draw(st.booleans()):
                resumed = state.recall(ordinal, found.outcome, found.since)
                assert resumed is not state, "what was in time before a kill is in time after it"
                state = resumed
        assert [one.ordinal for one in state.groups] == list(groups) and dict(state.left) == dict(flow.left)
        self.flow = state

    @precondition(lambda self: not self.flow.updating and self.settings.max_staleness)
    @rule()
    def go_on_behind_batches_that_are_taken_again(self) -> None:
        """Everything is recorded, and groups of the checkpoint may have begun anew since in a process before."""
        state = self.saved.restart(self.saved.version)
        versions = [*(version for version, _ in self.taken), self.flow.version][1:]
        for (_, fates), version in zip(self.taken, versions, strict=True):
            state = state.repeat(fates).flow.updated(version)
            if state.publish_is_due:
                state = state.publish()
        if state.served < self.flow.served:
            return  # what it publishes comes at other versions than before
        state = state.renew([one.ordinal for one in state.groups])
        groups, left = {one.ordinal: one for one in self.flow.groups}, dict(self.flow.left)
        known = [one.ordinal for one in state.groups]
        for ordinal in (*known, *range(state.next_ordinal, self.flow.next_ordinal)):
            if ordinal not in known:
                state = state.admit()
            if (found := groups.get(ordinal)) is not None:
                resumed = state.recall(ordinal, found.outcome, found.since)
                assert resumed is not state, "what was in time before a kill is in time after it"
                state = resumed
            else:
                state = state.recall(ordinal, next(one for one, its in FATES.items() if its is left[ordinal]), None)
        assert state.groups == self.flow.groups and dict(state.left) == left
        self.flow = state

    def settle(self, fates: dict[int, Fate]) -> None:
        for ordinal, fate in fates.items():
            assert self.fates[ordinal] is Fate.OPEN is not fate, "a final fate stays"
            self.fates[ordinal] = fate

    @invariant()
    def every_prompt_has_one_fate_and_the_rest_can_be_in_time(self) -> None:
        if not hasattr(self, "flow"):
            return
        open_ones = [ordinal for ordinal, fate in self.fates.items() if fate is Fate.OPEN]
        assert open_ones == [one.ordinal for one in self.flow.groups]
        assert list(self.fates) == list(range(self.flow.next_ordinal))
        assert all(len(batch) == self.settings.batch_size for batch in self.batches)
        counted = Counter(ordinal for batch in self.batches for ordinal in batch)
        assert not counted or max(counted.values()) == 1
        assert len(open_ones) <= (1 + self.settings.depth) * self.settings.batch_size
        assert self.flow.late(self.flow.groups, self.flow.version + self.flow.updating) is None

    def teardown(self) -> None:
        if hasattr(self, "flow"):
            self.run_to_the_end()
            left = dict(self.flow.left)
            self.flow, fates = self.flow.cancel()
            assert {one: self.fates[one] for one in left} == left == {one: fates.pop(one) for one in left}
            self.settle(fates)
            assert Fate.OPEN not in self.fates.values()

    def run_to_the_end(self) -> None:
        """From here on everything goes well: no state stands still, and what was admitted is all taken."""
        while True:
            while self.flow.can_admit:
                self.admit(1)
            for one in self.flow.groups:
                if one.outcome is None:
                    self.flow, _ = self.flow.finish(one.ordinal, Outcome.SCORED, None)
            if self.flow.updating:
                self.update(1)
            elif self.flow.step == self.settings.last_step:
                assert not self.flow.groups
                return
            else:
                before = self.flow.step
                self.take()
                assert self.flow.step == before + 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = tries(max_examples=15, stateful_step_count=30, deadline=None)


def test_batches_of_a_process_before_are_taken_again_and_what_had_ended_is_ready() -> None:
    flow = Flow(Settings(2, 9, 2, 2), step=3, version=3, served=3, next_ordinal=8, groups=(Group(6, 3), Group(7, 3)))
    again = flow.repeat({7: Fate.TRAINED, 9: Fate.TRAINED}).flow
    assert (again.step, again.updating, again.next_ordinal) == (4, True, 10)
    assert [one.ordinal for one in again.groups] == [6, 8], "8 was begun when 9 was"
    with pytest.raises(RuntimeError, match=r"step 4 cannot take prompts .* again"):
        flow.repeat(dict.fromkeys([5, 6], Fate.TRAINED))
    with pytest.raises(RuntimeError, match="step 5 cannot take"):
        again.repeat(dict.fromkeys([6, 8], Fate.TRAINED))
    flow = again.updated(4).publish()
    ready = flow.recall(6, Outcome.SCORED, 3)
    assert [(one.ordinal, one.since) for one in ready.ready] == [(6, 3)]
    assert flow.recall(6, Outcome.SCORED, 1) is flow, "too old for the batch at version 4"
    assert flow.recall(6, None, 1) is flow and flow.recall(6, None, 2) is not flow
    assert flow.recall(6, None, 2).groups[0] == Group(6, 2), "it goes on, as old as what it has sampled"
    assert ready.recall(8, Outcome.FAILED, None).ready[-1].outcome is Outcome.FAILED
    replacing = replace(ready, settings=replace(ready.settings, replaces=True)).recall(8, Outcome.FILTERED, None)
    assert [one.ordinal for one in replacing.groups] == [6] and replacing.left == ((8, Fate.FILTERED),)


def test_a_group_that_begins_anew_is_not_as_old_as_it_was() -> None:
    flow = replace(Flow(Settings(1, 9, 3, 3)).admit(), version=3, served=2)
    assert [flow.begin(0, told).groups[0].since for told in (0, 1, 3)] == [0, 1, 2]
    assert flow.begin(0).begin(0, 1).groups[0].since == 2, "what was told late makes nothing older"
