"""The real Router and Fleet in front of 64 simulated servers and 20,000 trajectories of several turns.

    python -m labs.cluster.router_simulation [--servers 64] [--trajectories 20000] [--concurrent 8192] [--seed 0]

Plays the same trajectories through several ways to route, and prints what each finds in the servers' prefix caches, how
evenly it loads them, and how long the step takes; again with long prompts, and with one slow server; then with a server
killed and with one that hangs: how long until its unfinished requests run elsewhere, and until it carries its share
again. What a server and a trajectory are is in `simulated_servers.py`. No GPU, about a minute; a seed repeats.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from agentrl.engines.servers.fleet import Action, Check, Fleet, FleetState, Restart, SendWeights
from agentrl.engines.servers.router import NoServer, Router
from agentrl.plan.simulated_servers import Clock, Lengths, Request, Session, SimulatedServer, Speed, workload

TICK = 0.5
"""Seconds between two looks at the fleet: the engine's loop."""
RETRY = 0.1
"""Seconds until a request that failed, or found no server, is routed again."""
LAUNCH = 60.0
"""Seconds from a restart to the server's first answer."""
TRANSFER = 5.0
"""Seconds to send one server the weights."""
VERSION = 1
SLOWER = 4.0
"""How many times slower the slow server is."""
FAULT_AT = 40.0
"""Seconds into the step: in full swing."""


LONG_PROMPTS = Lengths(question=(4000, 0.5, 500, 12_000))


class LeastLoaded(Router):
    """Routes by load only: no session has a server."""

    def route(self, session: str) -> str:
        self.forget(session)
        return super().route(session)

    def _place(self, session: str) -> str:
        return self._least_loaded()


class AtRandom(LeastLoaded):
    """Any server that serves."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def _least_loaded(self) -> str:
        return self._rng.choice(list(self._serving) or [super()._least_loaded()])


class NeverMoved(Router):
    """No server counts as crowded."""

    def _crowded(self, server: str) -> bool:
        return False


class EachAlone(Router):
    """Sticky, but a group's sessions are placed one by one: no name has a slash."""

    def route(self, session: str) -> str:
        return super().route(session.replace("/", "-"))

    def done(self, session: str, server: str) -> None:
        super().done(session.replace("/", "-"), server)

    def forget(self, session: str) -> None:
        super().forget(session.replace("/", "-"))


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the first server, and its time in seconds."""

    kind: Literal["slow", "killed", "hangs"]
    at: float = 0.0


@dataclass(slots=True)
class Recovery:
    """Recovery from a fault: seconds from it on, None where it did not come to that."""

    moved: int = 0
    """Requests that were in flight on the first server."""
    dead: float | None = None
    """Seconds until the fleet calls the server dead."""
    elsewhere: float | None = None
    """Seconds until the last of the requests runs on another server."""
    serves: float | None = None
    """Seconds until the restarted server serves, with the weights."""
    shares: float | None = None
    """Seconds until it has 90 % of the other servers' mean of requests in flight."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step. Times in seconds; fractions of 1."""

    hits: float
    """Part of the requests after a session's first turn that found all that the session had in the cache."""
    cached_later: float
    """Cached part of the prompt tokens, observations included, of requests after a session's first turn."""
    cached: float
    """Cached part of all requests' prompt tokens."""
    requests: float
    """The most requests that a server got over the mean."""
    busy: float
    """The same of busy seconds, when 95 % of the trajectories had ended."""
    load: float
    """The same of requests in flight, mean over that time."""
    waited: float
    """Mean seconds a request waits for its prefill."""
    most: float
    """Time at which 95 % of the trajectories had ended."""
    makespan: float
    """Time at which all had ended; what lies between is mostly the longest ones' own time, whatever the route."""
    recovery: Recovery


@dataclass(slots=True)
class Step:
    """One step's trajectories on a fleet: the part of the engine and of the scheduler."""

    clock: Clock
    servers: dict[str, SimulatedServer]
    fleet: Fleet
    router: Router
    sessions: deque[Session]
    fault: Fault | None
    unfinished: int = field(init=False)
    total: int = field(init=False)
    in_flight: dict[str, dict[str, Request]] = field(init=False)
    """Requests in flight by server and session."""
    displaced: set[str] = field(default_factory=set)
    """Sessions whose request broke and does not run again yet."""
    recovery: Recovery = field(default_factory=Recovery)
    loads: list[float] = field(default_factory=list)
    """The most requests in flight over the mean, at every look."""
    busy: float = 0.0
    most: float = 0.0

    def __post_init__(self) -> None:
        self.unfinished = self.total = len(self.sessions)
        self.in_flight = {name: {} for name in self.servers}

    def run(self, concurrent: int) -> Outcome:
        for server in self.servers:
            self.fleet.answered(server, None)
        self.fleet.target(VERSION)
        for server in self.servers:
            self.fleet.updated(server, VERSION)
        self.look()
        if self.fault is not None:
            self.clock.after(self.fault.at, lambda: self.strike(next(iter(self.servers.values()))))
        for _ in range(min(concurrent, len(self.sessions))):
            self.begin()
        self.clock.run(lambda: not self.unfinished)
        return self.outcome()

    # Trajectories

    def begin(self) -> None:
        if self.sessions:
            self.request(self.sessions.popleft())

    def request(self, session: Session) -> None:
        try:
            name = self.router.route(session.name)
        except NoServer:
            self.clock.after(RETRY, lambda: self.request(session))
            return
        server = self.servers[name]
        if not server.up:
            self.broken(session, name)
            return
        request = Request(session, self.clock.now, lambda r: self.answered(r, name), lambda r: self.begun(r))
        self.in_flight[name][session.name] = request
        server.submit(request)

    def begun(self, request: Request) -> None:
        if request.session.name in self.displaced:
            self.displaced.discard(request.session.name)
            if not self.displaced and self.fault is not None:
                self.recovery.elsewhere = self.clock.now - self.fault.at

    def answered(self, request: Request, name: str) -> None:
        session = request.session
        self.in_flight[name].pop(session.name)
        self.router.done(session.name, name)
        self.fleet.served(name)
        self.router.served(name, session.answers[session.turn], self.clock.now - request.arrived)
        session.repeated = False
        if (seconds := session.next_turn()) is not None:
            self.clock.after(seconds, lambda: self.request(session))
            return
        self.router.forget(session.name)
        self.unfinished -= 1
        if self.unfinished == self.total // 20:
            self.most = self.clock.now
            self.busy = over_mean([server.totals.busy for server in self.servers.values()])
        self.begin()

    def broken(self, session: Session, name: str) -> None:
        self.router.done(session.name, name)
        self.fleet.failed(name, "connection refused or broken")
        session.repeated = True
        self.clock.after(RETRY, lambda: self.request(session))

    # The fleet

    def look(self) -> None:
        """The engine's loop: do what is due, tell the router, abandon what hangs on a dead server."""
        for action in self.fleet.due():
            self.perform(action)
        self.router.set_serving(self.fleet.serving)
        if self.unfinished > self.total // 20:
            self.loads.append(over_mean(self.router.loads.values()))
        if self.fault is not None and self.clock.now >= self.fault.at:
            self.watch(next(iter(self.servers)), self.clock.now - self.fault.at)
        self.clock.after(TICK, self.look)

    def perform(self, action: Action) -> None:
        server = self.servers[action.server]

        def answer() -> None:
            if server.up:
                self.fleet.answered(server.name, None)
            else:
                self.fleet.failed(server.name, "connection refused", action)

        match action:
            case Check() if not server.frozen:
                self.clock.after(0.01, answer)
            case Check():
                self.clock.after(
                    self.fleet.timings.check_timeout, lambda: self.fleet.failed(server.name, "no answer", action)
                )
            case Restart():
                server.up = False
                self.fleet.started(server.name)
                self.clock.after(LAUNCH, server.come_up)
            case SendWeights(version=version):
                self.clock.after(TRANSFER, lambda: self.fleet.updated(server.name, version))

    def strike(self, server: SimulatedServer) -> None:
        assert self.fault is not None
        if self.fault.kind == "slow":
            server.slow_down(SLOWER)
            return
        self.displaced = set(self.in_flight[server.name])
        self.recovery.moved = len(self.displaced)
        if self.fault.kind == "hangs":
            server.freeze()
            return
        server.up = False
        self.break_requests(server.name)
        self.clock.after(TICK, lambda: self.fleet.exited(server.name, "killed"))

    def break_requests(self, name: str) -> None:
        for request in self.servers[name].fail_all():
            del self.in_flight[name][request.session.name]
            self.broken(request.session, name)

    def watch(self, name: str, after: float) -> None:
        """Note how far the server's recovery is. What still runs on a dead server is given up."""
        recovery, state = self.recovery, self.fleet.state(name)
        if state is FleetState.DEAD:
            recovery.dead = recovery.dead or after
            self.break_requests(name)
        if recovery.dead is None or state is not FleetState.HEALTHY:
            return
        recovery.serves = recovery.serves or after
        others = statistics.mean(load for server, load in self.router.loads.items() if server != name)
        if recovery.shares is None and self.router.loads[name] >= 0.9 * others > 1:
            recovery.shares = after

    def outcome(self) -> Outcome:
        totals = [server.totals for server in self.servers.values()]
        requests = [t.requests for t in totals]
        return Outcome(
            hits=sum(t.hits for t in totals) / sum(t.turns for t in totals),
            cached_later=sum(t.later_cached for t in totals) / sum(t.later_prompt for t in totals),
            cached=sum(t.cached for t in totals) / sum(t.prompt for t in totals),
            requests=over_mean(requests),
            busy=self.busy,
            load=statistics.mean(self.loads),
            waited=sum(t.waited for t in totals) / sum(requests),
            most=self.most,
            makespan=self.clock.now,
            recovery=self.recovery,
        )


def over_mean(values: Collection[float]) -> float:
    """The largest over the mean; 1 where all are 0."""
    mean = statistics.mean(values)
    return max(values) / mean if mean else 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A step to simulate."""

    servers: int = 64
    trajectories: int = 20_000
    group_size: int = 8
    concurrent: int = 8192
    """Trajectories at once; as one ends, the next begins."""
    seed: int = 0
    speed: Speed = field(default_factory=Speed)
    lengths: Lengths = field(default_factory=Lengths)

    def play(self, make_router: Callable[[], Router] = Router, fault: Fault | None = None) -> Outcome:
        clock = Clock()
        names = [f"server {i}" for i in range(self.servers)]
        servers = {name: SimulatedServer(name, clock, self.speed, self.lengths.system) for name in names}
        fleet = Fleet(names, lambda: clock.now, restartable=True)
        sessions = workload(self.trajectories, self.group_size, self.lengths, random.Random(self.seed))
        return Step(clock, servers, fleet, make_router(), deque(sessions), fault).run(self.concurrent)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--concurrent", type=int, default=8192, help="trajectories at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    scenario = Scenario(args.servers, args.trajectories, concurrent=args.concurrent, seed=args.seed)
    long_prompts = replace(scenario, lengths=LONG_PROMPTS)
    console = Console(width=120)
    console.print(
        f"{args.trajectories:,} trajectories in groups of {scenario.group_size}, {args.concurrent:,} at once, on"
        f" {args.servers} servers, seed {args.seed}; all times in simulated seconds"
    )
    routes: dict[str, Callable[[], Router]] = {
        "agentrl": Router,
        "each session alone": EachAlone,
        "never moved": NeverMoved,
        "least loaded": LeastLoaded,
        "at random": lambda: AtRandom(args.seed),
    }
    few = {name: routes[name] for name in ("agentrl", "each session alone", "least loaded")}
    console.print(table("all servers well", {name: scenario.play(make) for name, make in routes.items()}))
    console.print(table("long prompts (median 4,800)", {name: long_prompts.play(make) for name, make in few.items()}))
    slow = Fault("slow")
    few = {name: routes[name] for name in ("agentrl", "never moved", "least loaded")}
    console.print(table("one server 4 times slower", {name: scenario.play(make, slow) for name, make in few.items()}))
    faults: list[Fault] = [Fault("killed", FAULT_AT), Fault("hangs", FAULT_AT)]
    console.print(recoveries({fault.kind: scenario.play(Router, fault).recovery for fault in faults}))


def table(title: str, outcomes: Mapping[str, Outcome]) -> Table:
    """A row a route. Times also over the first row's."""
    table = Table("route", title=title, title_justify="left", box=box.SIMPLE)
    for column in ("hits", "cached\nturn 2+", "cached\nall", "requests\nmax/mean", "in flight\nmax/mean"):
        table.add_column(column, justify="right")
    for column in ("busy\nmax/mean", "wait\ns", "95 % done\ns", "all done\ns"):
        table.add_column(column, justify="right")
    first = next(iter(outcomes.values()))
    for name, o in outcomes.items():
        table.add_row(
            name,
            *[f"{fraction:.1%}" for fraction in (o.hits, o.cached_later, o.cached)],
            *[f"{ratio:.2f}" for ratio in (o.requests, o.load, o.busy)],
            f"{o.waited:.2f}",
            f"{o.most:.0f} ({o.most / first.most:.2f})",
            f"{o.makespan:.0f} ({o.makespan / first.makespan:.2f})",
        )
    return table


def recoveries(outcomes: Mapping[str, Recovery]) -> Table:
    """A row a fault; a dash where it did not come to that before the step's end."""
    table = Table(
        title=f"one server lost after {FAULT_AT:g} s (launch {LAUNCH:g} s)", title_justify="left", box=box.SIMPLE
    )
    for column in ("it", "requests there", "called dead", "all run elsewhere", "serves again", "has its share"):
        table.add_column(column, justify="left" if column == "it" else "right")
    for name, r in outcomes.items():
        times = (r.dead, r.elsewhere, r.serves, r.shares)
        table.add_row(name, str(r.moved), *["-" if time is None else f"after {time:.1f} s" for time in times])
    return table


if __name__ == "__main__":
    main()
