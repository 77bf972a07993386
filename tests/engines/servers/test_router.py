"""Routes: sticky by session, groups together, away from crowded servers, else by load."""

import statistics
import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrl.engines.servers.router import CROWDED, SLOW, SPARE, NoServer, Router
from tests.naming import naming

SERVERS = ["a", "b", "c", "d"]


def router(servers: list[str] | None = None) -> Router:
    made = Router()
    made.set_serving(SERVERS if servers is None else servers)
    return made


def test_requests_in_flight_come_before_sessions() -> None:
    r = router(["a", "b"])
    for session in ("one", "two", "three"):  # idle sessions: two at a, one at b
        r.done(session, r.route(session))
    assert r.route("two") == "b"
    assert r.route("new") == "a"


def test_a_transcript_goes_where_the_others_of_its_trajectory_are() -> None:
    """Also where the last session of its group went elsewhere."""
    r = router(["a", "b"])
    home = r.route("train/1/2/0.0")
    siblings = [f"train/1/2/{number}.0" for number in range(1, 3 * SPARE)]
    placed = [(session, r.route(session)) for session in siblings]
    first_elsewhere = next(session for session, server in placed if server != home)
    while placed[-1][1] == home:  # the group's last session is to be elsewhere
        placed.append((f"{placed[-1][0]}.0", r.route(f"{placed[-1][0]}.0")))
    for session, server in placed:
        r.done(session, server)
    assert r.route("train/1/2/0.0.3") == home
    assert r.route(f"{first_elsewhere}.0") != home


def slow_down(r: Router, server: str, times: float) -> None:
    """Answers of one second for 100 tokens everywhere, but at one server."""
    for _ in range(20):
        for each in r.serving:
            r.served(each, 100, times if each == server else 1.0)


def test_the_last_session_of_a_slow_server_leaves_it_for_an_idle_one() -> None:
    r = router()
    home = r.route("s")
    r.done("s", home)
    slow_down(r, home, 4.0)
    assert r.route("s") != home


@pytest.mark.parametrize(
    ("servers", "slow", "times", "shares"),
    [
        ("abcd", "b", [4.0], {"a": 40, "b": 10, "c": 40, "d": 40}),
        ("abcd", "b", [4.0, 1.0], dict.fromkeys("abcd", 10)),  # it has recovered
        ("abcd", "b", [1.9], dict.fromkeys("abcd", 10)),  # below the threshold
        ("ab", "a", [3.0], {"a": 10, "b": 30}),
    ],
)
def test_a_slow_server_gets_its_share_of_what_is_new(
    servers: str, slow: str, times: list[float], shares: dict[str, int]
) -> None:
    r = router(list(servers))
    for one in times:
        slow_down(r, slow, one)
    assert Counter(r.route(f"s{i}") for i in range(sum(shares.values()))) == shares


def test_the_pace_of_a_server_that_comes_back_is_unknown() -> None:
    r = router()
    slow_down(r, "b", 4.0)
    r.set_serving(["a", "c", "d"])
    r.set_serving(SERVERS)
    assert Counter(r.route(f"s{i}") for i in range(40)) == dict.fromkeys(SERVERS, 10)


def test_a_group_begins_on_one_server_and_groups_spread() -> None:
    r = router()
    homes = {group: {r.route(f"train/3/{group}/{k}.0") for k in range(8)} for group in range(4)}
    assert [len(servers) for servers in homes.values()] == [1] * 4
    assert set.union(*homes.values()) == set(SERVERS)


def test_a_session_of_a_group_that_ended_is_placed_by_load() -> None:
    r = router(["a", "b"])
    assert r.route("g/1") == "a"
    r.forget("g/1")
    assert r.route("g/2") == "b"


def test_a_large_group_overflows_to_the_next_server_when_its_own_is_crowded() -> None:
    r = router(["a", "b"])
    assert [r.route(f"g/{k}") for k in range(SPARE + 2)] == ["a"] * (SPARE + 1) + ["b"]


def test_a_session_stays_while_its_server_is_only_somewhat_fuller() -> None:
    r = router(["a", "b"])
    for _ in range(40):
        r.route("on b" if r.loads["a"] > r.loads["b"] else "on a")
    assert r.loads == {"a": 20, "b": 20}
    stays = int(CROWDED * 20 + SPARE)
    for _ in range(stays - 20):
        assert r.route("on a") == "a"
    assert r.loads["a"] == stays
    r.route("on a")
    assert r.route("on a") == "b"


def test_sessions_of_a_server_that_is_gone_spread_by_load_over_the_others() -> None:
    r = router()
    sessions = [f"s{i}" for i in range(40)]
    homes = {session: r.route(session) for session in sessions}
    for session in sessions:
        r.done(session, homes[session])
    r.set_serving(["b", "c", "d"])
    moved = [session for session in sessions if homes[session] == "a"]
    assert sorted(Counter(r.route(session) for session in moved).values()) == [3, 3, 4]
    assert all(r.route(session) == homes[session] for session in sessions if homes[session] != "a")


def test_requests_on_a_server_that_is_gone_count_until_they_are_done() -> None:
    r = router(["a"])
    r.route("s")
    r.set_serving(["b"])
    assert r.loads == {"a": 1, "b": 0}
    r.done("s", "a")
    assert r.loads == {"b": 0}


def test_a_request_cannot_be_done_twice_or_elsewhere() -> None:
    r = router()
    home = r.route("s")
    with naming(ValueError, "in flight"):
        r.done("s", next(server for server in SERVERS if server != home))
    r.done("s", home)
    with naming(ValueError, "in flight"):
        r.done("s", home)
    assert set(r.loads.values()) == {0}


def test_a_route_costs_microseconds_with_64_servers_and_20000_sessions() -> None:
    r = router([f"server {i}" for i in range(64)])
    began = time.process_time()
    for i in range(20_000):
        r.route(f"train/1/{i // 8}/{i % 8}.0")
    for i in range(20_000):
        r.route(f"train/1/{i // 8}/{i % 8}.0")
    assert (time.process_time() - began) / 40_000 < 100e-6  # about 10 here; room for slow machines
    assert max(r.loads.values()) < 1.1 * min(r.loads.values())


class Routing(RuleBasedStateMachine):
    """Any order of calls, against the plain list of what is in flight."""

    sessions = st.sampled_from([f"{group}{member}" for group in ("x/", "y/", "") for member in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.serving: list[str] = []
        self.in_flight: list[tuple[str, str]] = []
        self.homes: dict[str, str] = {}

    @rule(servers=st.lists(st.sampled_from(SERVERS), unique=True))
    def set_serving(self, servers: list[str]) -> None:
        self.router.set_serving(servers)
        self.serving = servers
        self.homes = {session: home for session, home in self.homes.items() if home in servers}

    @rule(session=sessions, times=st.integers(1, 12))
    def route(self, session: str, times: int) -> None:
        for _ in range(times):
            if not self.serving:
                with pytest.raises(NoServer):
                    self.router.route(session)
                return
            loads, slowness = dict(self.router.loads), self.router._slowness
            weighed = {server: (loads[server] + 1) * slowness.get(server, 1.0) for server in self.serving}
            server = self.router.route(session)
            least, home = min(weighed.values()), self.homes.get(session)
            assert server in self.serving
            assert weighed[server] <= CROWDED * least + SPARE or server in slowness
            if home is not None and home not in slowness and weighed[home] <= CROWDED * least + SPARE:
                assert server == home
            self.homes[session] = server
            self.in_flight.append((session, server))

    @rule(server=st.sampled_from(SERVERS), tokens=st.integers(0, 50), seconds=st.sampled_from([0.0, 1.0, 5.0, 40.0]))
    def served(self, server: str, tokens: int, seconds: float) -> None:
        self.router.served(server, tokens, seconds)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        session, server = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.router.done(session, server)

    @rule(session=sessions)
    def forget(self, session: str) -> None:
        self.router.forget(session)
        self.homes.pop(session, None)

    @invariant()
    def loads_are_what_is_in_flight(self) -> None:
        expected = dict.fromkeys(self.serving, 0) | Counter(server for _, server in self.in_flight)
        assert self.router.loads == expected

    @invariant()
    def the_least_loaded_is_that_of_a_linear_search(self) -> None:
        router = self.router
        paces = {server: seconds / tokens for server, (seconds, tokens) in router._paces.items()}
        usual = statistics.median_low(paces.values()) if len(paces) > 1 else 0.0
        slow = {server: pace / usual for server, pace in paces.items() if pace > SLOW * usual > 0.0}
        assert router._slowness == slow
        if self.serving:
            sessions = Counter(self.homes.values())
            keys = [((router.loads[s] + 1) * slow.get(s, 1.0), sessions[s], n) for n, s in enumerate(self.serving)]
            assert router._first() == self.serving[min(keys)[2]]

    @invariant()
    def nothing_is_kept_of_sessions_that_are_over(self) -> None:
        assert self.router._home == self.homes
        kin = sum(2 if session.rpartition("/")[0] else 1 for session in self.homes)
        assert sum(count for _, count in self.router._last.values()) == kin


Routing.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRouting = Routing.TestCase
