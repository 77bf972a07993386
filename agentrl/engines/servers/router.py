"""Which server runs a session's next request: the one that has its prefix in the cache, unless that is crowded.

A session keeps its server from its first request until `forget`, or until the server stops serving (whatever comes back
has an empty cache, so its sessions are placed anew). A new session goes where its group is, whose prompt it shares.
Neither stays at a crowded server, one with more than `CROWDED` times the requests in flight of the least loaded one and
`SPARE` more: waiting there costs more than computing the prefix again.
All else goes to the least loaded server; of several, to the one with fewest sessions, so that servers fill evenly.

At a server that takes `SLOW` times as long for a token as the median one, each request counts as that many, and no
session stays while another server is free: a dying disk or a throttled GPU must not hold up a step.

No I/O, no clock: the same calls give the same routes. The rules and both numbers were chosen by simulation:
`benchmarks/cluster/router_simulation.py`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from agentrl.engines.contract import EngineError

CROWDED = 1.5
SPARE = 8
SLOW = 2.0
MEMORY = 0.9
"""What a server's earlier answers weigh in its pace when another one comes."""


class NoServer(EngineError):
    """No server is serving now; one may be later."""


class Router:
    """Where the sessions are, and how many requests are in flight. A route takes time linear in the servers.

    A session's group is its name up to the last slash: "train/3/17" of "train/3/17/5.0".
    """

    def __init__(self) -> None:
        self._serving: dict[str, None] = {}
        self._home: dict[str, str] = {}
        """By session: its server, one that serves."""
        self._sessions: dict[str, set[str]] = {}
        """By serving server: the sessions at home there."""
        self._groups: dict[str, tuple[str, int]] = {}
        """By group: where its last session was placed, and how many of its sessions have a home."""
        self._loads: dict[str, int] = {}
        self._in_flight: Counter[tuple[str, str]] = Counter()
        """By session and server."""
        self._paces: dict[str, tuple[float, float]] = {}
        """By serving server: seconds and tokens of its answers, older ones weighing less."""
        self._slowness: dict[str, float] = {}
        """Of the slow ones: how many times as long as the median server they take for a token."""

    def set_serving(self, servers: Collection[str]) -> None:
        """These may be routed to from now on; the sessions of all others are placed anew at their next request."""
        for server in self._serving.keys() - set(servers):
            for session in list(self._sessions[server]):
                self.forget(session)
            del self._sessions[server]
            self._paces.pop(server, None)
        self._serving = dict.fromkeys(servers)
        for server in self._serving:
            self._sessions.setdefault(server, set())
            self._loads.setdefault(server, 0)
        self._loads = {server: load for server, load in self._loads.items() if load or server in self._serving}
        self._compare()

    @property
    def serving(self) -> Collection[str]:
        """Those that may be routed to."""
        return self._serving.keys()

    def route(self, session: str) -> str:
        """The server for the session's next request, which is in flight there until `done`. Raises NoServer."""
        server = self._home.get(session)
        if server is None or self._crowded(server):
            server = self._place(session)
        self._loads[server] += 1
        self._in_flight[session, server] += 1
        return server

    def done(self, session: str, server: str) -> None:
        """A request that `route` sent there is over, however it ended. Raises ValueError where there is none."""
        left = self._in_flight[session, server] - 1
        if left < 0:
            raise ValueError(f"session {session!r} has no request in flight at {server}")
        if left:
            self._in_flight[session, server] = left
        else:
            del self._in_flight[session, server]
        self._loads[server] -= 1
        if not self._loads[server] and server not in self._serving:
            del self._loads[server]

    def served(self, server: str, tokens: int, seconds: float) -> None:
        """An answer of so many tokens took so long there, from its request to its end."""
        if server in self._serving and tokens:
            before = self._paces.get(server, (0.0, 0.0))
            self._paces[server] = MEMORY * before[0] + seconds, MEMORY * before[1] + tokens
            self._compare()

    def forget(self, session: str) -> None:
        """The session is over. Its requests in flight count until they are `done`. Unknown is no error."""
        server = self._home.pop(session, None)
        if server is None:
            return
        self._sessions[server].discard(session)
        group = _group(session)
        last, sessions = self._groups.pop(group)
        if sessions > 1:
            self._groups[group] = last, sessions - 1

    @property
    def loads(self) -> Mapping[str, int]:
        """Requests in flight by server: all that serve, and those that do not any more but still have some."""
        return MappingProxyType(self._loads)

    def _compare(self) -> None:
        paces = {server: seconds / tokens for server, (seconds, tokens) in self._paces.items()}
        usual = statistics.median_low(paces.values()) if len(paces) > 1 else 0.0
        self._slowness = {server: pace / usual for server, pace in paces.items() if pace > SLOW * usual > 0.0}

    def _crowded(self, server: str) -> bool:
        spare = 0 if server in self._slowness else SPARE
        cost = self._cost(server)
        return cost > spare + 1 and cost > CROWDED * min(map(self._cost, self._serving)) + spare

    def _cost(self, server: str) -> float:
        """Of one request more there."""
        return (self._loads[server] + 1) * self._slowness.get(server, 1.0)

    def _place(self, session: str) -> str:
        """Give the session a home: where its group is, or the least loaded server."""
        self.forget(session)
        group = _group(session)
        server, sessions = self._groups.get(group, ("", 0))
        if not group or server not in self._serving or self._crowded(server):
            server = self._least_loaded()
        self._home[session] = server
        self._sessions[server].add(session)
        self._groups[group] = server, sessions + 1
        return server

    def _least_loaded(self) -> str:
        if not self._serving:
            raise NoServer("no server is serving: all are starting, waiting for weights, or dead")
        return min(self._serving, key=lambda server: (self._cost(server), len(self._sessions[server])))


def _group(session: str) -> str:
    """Empty where the name has no slash: such sessions share nothing."""
    return session.rpartition("/")[0]
