"""The fleet's states, one transition a test, with a clock that is turned by hand; and its invariants in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrl.engines.servers.fleet import Action, Check, Fleet, FleetState, Restart, SendWeights, Timings

TIMINGS = Timings(
    check_interval=10,
    recheck_interval=1,
    check_timeout=5,
    failures=3,
    start_timeout=100,
    update_timeout=50,
    backoff=2,
    backoff_limit=16,
    restarts=3,
    restart_window=1000,
)


class HandClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A fleet of one server, "s", or of those given, healthy from the start unless `fresh`; and its clock."""

    def __init__(self, *servers: str, restartable: bool = True, fresh: bool = False) -> None:
        self.clock = HandClock()
        self.fleet = Fleet(servers or ("s",), self.clock, restartable=restartable, timings=TIMINGS)
        for server in () if fresh else servers or ("s",):
            self.fleet.answered(server, None)

    def state(self) -> FleetState:
        return self.fleet.state("s")

    def after(self, seconds: float) -> list[Action]:
        """What is due `seconds` from now, asked for every half second, as an engine does."""
        end = self.clock.now + seconds
        actions: list[Action] = []
        while self.clock.now < end and not actions:
            self.clock.now = min(self.clock.now + 0.5, end)
            actions = self.fleet.due()
        assert self.clock.now == end, f"{actions} came {end - self.clock.now} s early"
        return actions

    def die(self) -> None:
        self.fleet.exited("s", "exit status 1")


def test_starting_is_checked_until_it_answers() -> None:
    b = Bench(fresh=True)
    (check,) = b.fleet.due()
    assert check == Check("s") and b.state() is FleetState.STARTING and b.fleet.serving == []
    b.fleet.failed("s", "connection refused", check)
    assert b.fleet.due() == []
    (check,) = b.after(1)
    for _ in range(10):  # far more failures than a running server may have
        b.fleet.failed("s", "connection refused", check)
        (check,) = b.after(1)
    b.fleet.answered("s", 0)
    assert b.state() is FleetState.HEALTHY and b.fleet.serving == ["s"] and b.fleet.reason("s") == ""


def test_starting_too_long_is_dead() -> None:
    b = Bench(fresh=True)
    (check,) = b.fleet.due()
    b.fleet.failed("s", "connection refused", check)
    while b.state() is FleetState.STARTING:
        b.clock.now += 1
        for check in b.fleet.due():
            b.fleet.failed("s", "connection refused", check)
    assert b.clock.now == 1100
    assert b.fleet.reason("s") == "no answer within 100 s of its launch: connection refused"


def test_failed_checks_in_a_row_make_it_dead_and_it_serves_until_then() -> None:
    b = Bench()
    (check,) = b.after(10)
    for _ in range(2):
        b.fleet.failed("s", "502", check)
        assert b.fleet.serving == ["s"] and b.fleet.reason("s") == "502"
        (check,) = b.after(1)
    b.fleet.failed("s", "503", check)
    assert b.state() is FleetState.DEAD and b.fleet.reason("s") == "503" and b.fleet.serving == []


def test_an_answer_between_failed_checks_starts_the_count_again() -> None:
    b = Bench()
    wait = 10.0
    for _ in range(4):
        for _ in range(2):
            (check,) = b.after(wait)
            b.fleet.failed("s", "502", check)
            wait = 1
        b.after(1)
        b.fleet.answered("s", None)
        wait = 10
    assert b.state() is FleetState.HEALTHY


def test_a_check_that_takes_too_long_is_a_failure_and_what_comes_of_it_later_is_not_a_second_one() -> None:
    b = Bench()
    (late,) = b.after(10)
    assert b.after(5) == []
    assert b.fleet.reason("s") == "Check took longer than 5 s"
    (check,) = b.after(1)
    for _ in range(5):
        b.fleet.failed("s", "cancelled", late)
    assert b.state() is FleetState.HEALTHY
    assert check is not late and b.fleet.due() == []


def test_a_failed_request_is_followed_by_a_check_at_once() -> None:
    b = Bench()
    b.fleet.failed("s", "connection broke")
    assert b.fleet.suspect("s") and b.fleet.serving == ["s"]
    assert b.fleet.due() == [Check("s")]
    b.fleet.answered("s", None)
    assert not b.fleet.suspect("s") and b.fleet.reason("s") == ""


def test_a_suspicion_ends_with_new_weights_which_a_server_that_took_them_has_answered() -> None:
    b = Bench()
    b.fleet.failed("s", "connection broke")
    b.fleet.target(2)
    b.fleet.updated("s", 2)
    assert not b.fleet.suspect("s") and b.fleet.serving == ["s"]


def test_requests_that_break_together_count_once() -> None:
    b = Bench()
    for _ in range(100):
        b.fleet.failed("s", "connection broke")
    assert b.state() is FleetState.HEALTHY


def test_a_server_that_answers_checks_but_fails_all_requests_is_dead_in_the_end() -> None:
    b = Bench()
    for _ in range(2):
        b.fleet.failed("s", "500")
        b.fleet.due()
        b.fleet.answered("s", None)
    b.fleet.failed("s", "500")
    assert b.state() is FleetState.DEAD and b.fleet.reason("s") == "500"


def test_a_request_that_is_served_starts_the_count_of_failed_requests_again() -> None:
    b = Bench()
    for _ in range(10):
        b.fleet.failed("s", "500")
        b.fleet.due()
        b.fleet.answered("s", None)
        b.fleet.served("s")
    assert b.state() is FleetState.HEALTHY


def test_new_weights_make_all_stale_until_each_was_sent_them() -> None:
    b = Bench("s", "t")
    b.fleet.target(1)
    assert b.state() is FleetState.STALE and b.fleet.serving == []
    assert b.fleet.due() == [SendWeights("s", 1), SendWeights("t", 1)]
    b.fleet.updated("t", 1)
    assert b.fleet.serving == ["t"] and b.fleet.due() == []
    b.fleet.updated("s", 1)
    assert b.fleet.serving == ["s", "t"]
    b.fleet.target(1)  # nothing new
    assert b.fleet.serving == ["s", "t"]


def test_new_weights_do_not_wait_for_a_check_under_way_whose_failure_then_means_nothing() -> None:
    b = Bench()
    (check,) = b.after(10)
    b.fleet.target(1)
    assert b.fleet.due() == [SendWeights("s", 1)]
    b.fleet.failed("s", "cancelled", check)
    assert b.fleet.due() == []
    b.fleet.updated("s", 1)
    assert b.state() is FleetState.HEALTHY


def test_weights_that_are_old_when_they_arrive_leave_it_stale() -> None:
    b = Bench()
    b.fleet.target(1)
    b.fleet.due()
    b.fleet.target(2)
    assert b.fleet.due() == []
    b.fleet.updated("s", 1)
    assert b.state() is FleetState.STALE
    assert b.fleet.due() == [SendWeights("s", 2)]


def test_transfers_that_fail_in_a_row_make_it_dead() -> None:
    b = Bench()
    b.fleet.target(1)
    (send,) = b.fleet.due()
    for _ in range(2):
        b.fleet.failed("s", "out of memory", send)
        assert b.state() is FleetState.STALE
        (send,) = b.after(1)
    assert b.after(50) == []  # too long
    assert b.state() is FleetState.DEAD and b.fleet.reason("s") == "SendWeights took longer than 50 s"


def test_while_it_rolls_servers_serve_with_either_version_and_not_with_another() -> None:
    b = Bench("s", "t")
    b.fleet.rolls_to(1)
    b.fleet.exchanging(["s"])
    assert b.fleet.serving == ["s", "t"] and (b.fleet.version("s"), b.fleet.version("t")) == (0, 0)
    assert b.after(10) == [Check("t")], "one that is paused cannot answer a check"
    b.fleet.updated("s", 1)
    b.fleet.exchanged(["s"])
    assert b.fleet.serving == ["s", "t"] and b.fleet.version("s") == 1
    b.fleet.exchanging(["t"])
    b.fleet.stale("t", "did not take the weights")
    b.fleet.exchanged(["t"])
    assert b.fleet.serving == ["s"] and b.fleet.reason("t") == "did not take the weights"
    b.fleet.target(1)
    assert b.fleet.serving == ["s"]
    b.fleet.updated("t", 0)
    assert b.fleet.serving == ["s"]
    b.fleet.target(0)  # back to an earlier checkpoint
    assert b.fleet.serving == [] and b.state() is FleetState.STALE


def test_weights_are_not_asked_for_while_they_change() -> None:
    b = Bench()
    b.fleet.target(1)
    b.fleet.sendable = False
    assert b.after(100) == [] and b.state() is FleetState.STALE
    b.fleet.sendable = True
    (send,) = b.fleet.due()
    assert send == SendWeights("s", 1)
    b.fleet.sendable = False
    b.fleet.postponed("s")
    assert b.after(100) == [] and b.state() is FleetState.STALE, "it is at no fault"
    b.fleet.sendable = True
    assert b.fleet.due() == [send]


def test_old_weights_in_a_generation_make_it_stale() -> None:
    b = Bench()
    b.fleet.target(1)
    b.fleet.updated("s", 1)
    b.fleet.stale("s")
    assert b.state() is FleetState.STALE and "older weights" in b.fleet.reason("s")
    assert b.fleet.due() == [SendWeights("s", 1)]


def test_an_answer_with_other_weights_makes_it_stale() -> None:
    b = Bench()
    b.fleet.target(1)
    b.fleet.updated("s", 1)
    assert b.after(10) == [Check("s")]
    b.fleet.answered("s", 0)
    assert b.state() is FleetState.STALE
    assert b.fleet.reason("s") == "has the weights of version 0 instead of 1"
    assert b.fleet.due() == [SendWeights("s", 1)]


def test_a_dead_server_is_launched_again_and_gets_the_weights_before_it_serves_even_if_it_claims_to_have_them() -> None:
    b = Bench()
    b.fleet.target(1)
    b.fleet.updated("s", 1)
    b.die()
    assert b.state() is FleetState.DEAD and b.fleet.serving == []
    assert b.after(2) == [Restart("s")]
    b.fleet.started("s")
    assert b.state() is FleetState.STARTING
    assert b.fleet.due() == [Check("s")]
    b.fleet.answered("s", 1)
    assert b.state() is FleetState.STALE and b.fleet.serving == []
    assert b.fleet.due() == [SendWeights("s", 1)]
    b.fleet.updated("s", 1)
    assert b.state() is FleetState.HEALTHY


def test_a_server_that_died_while_it_was_sent_weights_is_launched_only_when_the_sender_is_through() -> None:
    b = Bench()
    b.fleet.target(1)
    (send,) = b.fleet.due()
    b.die()
    assert b.after(20) == []
    b.fleet.failed("s", "connection refused", send)
    assert b.fleet.due() == [Restart("s")]


def test_weights_that_a_dead_server_was_sent_do_not_bring_it_back() -> None:
    b = Bench()
    b.fleet.target(1)
    b.fleet.due()
    b.die()
    b.fleet.updated("s", 1)
    b.fleet.answered("s", 1)
    assert b.state() is FleetState.DEAD


def test_restarts_back_off_and_end() -> None:
    b = Bench()
    for delay in (2, 4, 8):
        b.die()
        assert not b.fleet.hopeless
        assert b.after(delay) == [Restart("s")]
        b.fleet.started("s")
    b.die()
    assert b.after(3000) == []
    assert b.fleet.hopeless
    assert b.fleet.reason("s") == "exit status 1 (stays dead: 3 restarts within 1000 s did not help)"


def test_restarts_long_ago_do_not_count() -> None:
    b = Bench()
    for _ in range(10):
        b.die()
        assert b.after(2) == [Restart("s")]
        b.fleet.started("s")
        b.fleet.answered("s", None)
        b.clock.now += 1001
        b.fleet.due()
        b.fleet.answered("s", None)
    assert b.state() is FleetState.HEALTHY


def test_a_restart_that_fails_counts_as_a_death() -> None:
    b = Bench()
    b.die()
    (restart,) = b.after(2)
    b.fleet.failed("s", "no such file: python", restart)
    assert b.fleet.reason("s") == "no such file: python"
    assert b.after(4) == [Restart("s")]


def test_an_exit_that_is_told_again_changes_nothing() -> None:
    b = Bench()
    b.die()
    for _ in range(3):
        b.after(0.5)
        b.die()
    assert b.after(0.5) == [Restart("s")]


def test_a_server_that_is_not_ours_is_asked_again_with_back_off_and_gets_the_weights_when_it_answers() -> None:
    b = Bench(restartable=False)
    b.fleet.target(1)
    b.fleet.updated("s", 1)
    b.die()
    for delay in (2, 4, 8, 16, 16, 16):
        (check,) = b.after(delay)
        assert check == Check("s") and b.state() is FleetState.DEAD
        b.fleet.failed("s", "connection refused", check)
    assert not b.fleet.hopeless
    assert b.after(16) == [Check("s")]
    b.fleet.answered("s", 1)
    assert b.state() is FleetState.STALE
    assert b.fleet.due() == [SendWeights("s", 1)]


def test_before_there_are_weights_a_server_that_is_launched_again_serves() -> None:
    b = Bench()
    b.die()
    b.after(2)
    b.fleet.started("s")
    b.fleet.answered("s", 0)
    assert b.state() is FleetState.HEALTHY
    b.fleet.stale("s")
    assert b.state() is FleetState.HEALTHY  # nothing to send yet


def test_an_unknown_server_is_an_error() -> None:
    with pytest.raises(KeyError):
        Bench().fleet.served("t")


class Events(RuleBasedStateMachine):
    """Any events in any order, the actions' own results early, late or never."""

    servers = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.fleet = self.make()
        self.target_version: int | None = None
        self.incoming: int | None = None
        self.sent: dict[str, int | None] = dict.fromkeys("abc")
        """The version that was sent since the last sign that it may be gone."""
        self.out: dict[str, tuple[Action, float]] = {}
        """Handed out, and until when."""
        self.all_out: list[Action] = []

    def make(self) -> Fleet:
        return Fleet(["a", "b", "c"], self.clock, restartable=True, timings=TIMINGS)

    def ended(self, server: str, kind: type[Action]) -> None:
        if server in self.out and isinstance(self.out[server][0], kind):
            del self.out[server]

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0, 30.0, 200.0]))
    def due(self, seconds: float) -> None:
        self.clock.now += seconds
        before = {server: self.fleet.state(server) for server in "abc"}
        actions = self.fleet.due()
        assert len({action.server for action in actions}) == len(actions)
        for action in actions:
            if action.server in self.out:
                running, until = self.out[action.server]
                assert isinstance(running, Check) or self.clock.now >= until
            limit = {Check: 5, Restart: 100, SendWeights: 50}[type(action)]
            self.out[action.server] = action, self.clock.now + limit
            self.all_out.append(action)
            if isinstance(action, SendWeights):
                assert action.version == self.target_version
                assert before[action.server] is FleetState.STALE
            if isinstance(action, Restart):
                assert self.fleet.state(action.server) is FleetState.DEAD
        assert self.fleet.due() == []

    @rule(server=servers)
    def started(self, server: str) -> None:
        self.fleet.started(server)
        self.sent[server] = None
        self.ended(server, Restart)
        assert self.fleet.state(server) is FleetState.STARTING

    @rule(server=servers, version=st.none() | st.integers(0, 3))
    def answered(self, server: str, version: int | None) -> None:
        self.fleet.answered(server, version)
        self.ended(server, Check)

    @rule(server=servers)
    def served(self, server: str) -> None:
        self.fleet.served(server)

    @rule(server=servers)
    def request_failed(self, server: str) -> None:
        self.fleet.failed(server, "500")

    @precondition(lambda self: self.all_out)
    @rule(data=st.data())
    def action_failed(self, data: st.DataObject) -> None:
        action = data.draw(st.sampled_from(self.all_out[-6:]))
        self.fleet.failed(action.server, "refused", action)
        if action.server in self.out and self.out[action.server][0] is action:
            del self.out[action.server]

    @rule(server=servers)
    def exited(self, server: str) -> None:
        self.fleet.exited(server, "exit status 1")
        self.sent[server] = None
        assert self.fleet.state(server) is FleetState.DEAD

    @rule(server=servers, version=st.integers(0, 3))
    def updated(self, server: str, version: int) -> None:
        if self.fleet.state(server) in (FleetState.HEALTHY, FleetState.STALE):
            self.sent[server] = version
        self.fleet.updated(server, version)
        self.ended(server, SendWeights)

    @rule(version=st.integers(0, 3))
    def target(self, version: int) -> None:
        self.fleet.target(version)
        self.target_version, self.incoming = version, None

    @rule(version=st.integers(0, 3))
    def rolls_to(self, version: int) -> None:
        if self.target_version is None:
            self.target_version = 0
            self.sent = {server: 0 if server in self.fleet.serving else None for server in "abc"}
        self.fleet.rolls_to(version)
        self.incoming = version

    @rule(server=servers)
    def stale(self, server: str) -> None:
        self.fleet.stale(server)
        if self.target_version is not None:
            assert self.fleet.state(server) is not FleetState.HEALTHY

    @invariant()
    def what_serves_was_sent_the_target_and_is_healthy(self) -> None:
        serving = self.fleet.serving
        assert serving == [server for server in "abc" if self.fleet.state(server) is FleetState.HEALTHY]
        if self.target_version is not None:
            assert all(self.sent[server] in (self.target_version, self.incoming) for server in serving)
            assert all(self.sent[server] is not None for server in serving)

    @invariant()
    def what_does_not_serve_says_why(self) -> None:
        assert all(self.fleet.reason(server) for server in "abc" if server not in self.fleet.serving)


class AttachedEvents(Events):
    """The same where no server can be launched again."""

    def make(self) -> Fleet:
        return Fleet(["a", "b", "c"], self.clock, restartable=False, timings=TIMINGS)

    @invariant()
    def nothing_is_restarted_and_nothing_is_hopeless(self) -> None:
        assert not any(isinstance(action, Restart) for action in self.all_out)
        assert not self.fleet.hopeless


for machine in (Events, AttachedEvents):
    machine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestEvents = Events.TestCase
TestAttachedEvents = AttachedEvents.TestCase
