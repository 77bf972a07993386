"""Router of requests: a session goes to the server that has its prefix in the cache, unless that is crowded.

A session keeps its server from its first request until `forget`, or until the server stops serving. A server that
returns has an empty cache, so its sessions are placed again. A new session goes to the server of its trajectory's other
sessions, whose transcripts begin alike, or to its group's server, as the group shares a prompt. All avoid a crowded
server: its requests in flight are more than `CROWDED` times the least loaded
server's, and `SPARE` more. Waiting there costs more than computing the prefix again.
All else goes to the least loaded server; of several, to the one with fewest sessions, so that servers fill evenly.

A server may take `SLOW` times as long for a token as the median one. Then each of its requests counts as that many, and
no session stays while another server is free: a dying disk or a throttled GPU must not hold up a step.

No I/O, no clock: the same calls give the same routes. The rules and both numbers were chosen by simulation:
`labs/cluster/router_simulation.py`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from agentrl.engines.contract import EngineError, trajectory_of

CROWDED = 1.5
SPARE = 8
SLOW = 2.0
MEMORY = 0.9
"""Weight of a server's earlier answers in its pace when another one comes."""


_Place = tuple[float, int, int]
"""Load with one more request, times slowness; sessions; number. The lowest is the least loaded server."""


class NoServer(EngineError):
    """Raised when no server is serving now; one may be later."""


class Router:
    """Chooses servers by their sessions, requests in flight and pace, in time logarithmic in the servers.

    A session's group is its name up to the last slash: "train/3/17" of "train/3/17/5.0". Its trajectory is that of
    `trajectory_of`.
    """

    def __init__(self) -> None:
        self._serving: dict[str, None] = {}
        self._order: dict[str, int] = {}
        """By serving server: its number, by which it comes first among its equals."""
        self._home: dict[str, str] = {}
        """By session: its home, a server that serves."""
        self._sessions: dict[str, set[str]] = {}
        """By serving server: the sessions whose home it is."""
        self._last: dict[tuple[str, str], tuple[str, int]] = {}
        """By trajectory and by group: the server of its last session, and how many of its sessions have a home."""
        self._loads: dict[str, int] = {}
        self._in_flight: Counter[tuple[str, str]] = Counter()
        """Requests by session and server."""
        self._places: dict[str, _Place] = {}
        """By serving server: its place among them."""
        self._queue: list[tuple[_Place, str]] = []
        """Heap of places, the least loaded first; places that belong to no server any more are skipped."""
        self._paces: dict[str, tuple[float, float]] = {}
        """By serving server: seconds and tokens of its answers, older ones weighing less."""
        self._by_pace: list[tuple[float, str]] = []
        """Serving servers that have answered by their seconds a token, rising."""
        self._slowness: dict[str, float] = {}
        """By slow server: its seconds a token divided by the median server's."""

    def set_serving(self, servers: Collection[str]) -> None:
        """Set the servers that may be routed to. Sessions of all others are placed again at their next request."""
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
        self._by_pace = sorted((seconds / tokens, server) for server, (seconds, tokens) in self._paces.items())
        self._order = {server: number for number, server in enumerate(self._serving)}
        self._slowness = self._slow()
        self._sort()

    @property
    def serving(self) -> Collection[str]:
        """Servers that may be routed to."""
        return self._serving.keys()

    def route(self, session: str) -> str:
        """Choose the server for a session's next request, which is in flight there until `done`. Raises NoServer."""
        server = self._home.get(session)
        if server is None or self._crowded(server):
            server = self._place(session)
        self._loads[server] += 1
        self._in_flight[session, server] += 1
        self._moved(server)
        return server

    def done(self, session: str, server: str) -> None:
        """End a request that `route` placed, in success or failure. Raises ValueError without such a request."""
        left = self._in_flight[session, server] - 1
        if left < 0:
            raise ValueError(f"session {session!r} has no request in flight at {server}")
        if left:
            self._in_flight[session, server] = left
        else:
            del self._in_flight[session, server]
        self._loads[server] -= 1
        if server in self._serving:
            self._moved(server)
        elif not self._loads[server]:
            del self._loads[server]

    def served(self, server: str, tokens: int, seconds: float) -> None:
        """Record an answer's tokens and its seconds from request to end, for the server's pace."""
        if server in self._serving and tokens:
            before = self._paces.get(server, (0.0, 0.0))
            if server in self._paces:
                del self._by_pace[bisect_left(self._by_pace, (before[0] / before[1], server))]
            self._paces[server] = pace = MEMORY * before[0] + seconds, MEMORY * before[1] + tokens
            insort(self._by_pace, (pace[0] / pace[1], server))
            earlier, self._slowness = self._slowness, self._slow()
            for one in earlier.keys() | self._slowness.keys():
                self._moved(one)

    def forget(self, session: str) -> None:
        """Forget a session. Its requests in flight count until `done`. An unknown session is no error."""
        server = self._home.pop(session, None)
        if server is None:
            return
        self._sessions[server].discard(session)
        self._moved(server)
        for kin in _kin(session):
            last, sessions = self._last.pop(kin)
            if sessions > 1:
                self._last[kin] = last, sessions - 1

    @property
    def loads(self) -> Mapping[str, int]:
        """Requests in flight by server: all that serve, and all that no longer serve but still have some."""
        return MappingProxyType(self._loads)

    def _slow(self) -> dict[str, float]:
        """Compare the servers' paces: each slow one's, divided by the median server's."""
        usual = self._by_pace[(len(self._by_pace) - 1) // 2][0] if len(self._by_pace) > 1 else 0.0
        if not usual:
            return {}
        slow = self._by_pace[bisect_right(self._by_pace, SLOW * usual, key=lambda one: one[0]) :]
        return {server: pace / usual for pace, server in slow}

    def _crowded(self, server: str) -> bool:
        spare = 0 if server in self._slowness else SPARE
        load = self._load_with_one_more(server)
        return load > spare + 1 and load > CROWDED * self._load_with_one_more(self._first()) + spare

    def _load_with_one_more(self, server: str) -> float:
        """Load of the server after one more request, times its slowness."""
        return (self._loads[server] + 1) * self._slowness.get(server, 1.0)

    def _moved(self, server: str) -> None:
        """Give a serving server the place that its load, its slowness and its sessions give it now."""
        place = self._load_with_one_more(server), len(self._sessions[server]), self._order[server]
        if place != self._places.get(server):
            self._places[server] = place
            heapq.heappush(self._queue, (place, server))
            if len(self._queue) > 64 + 4 * len(self._places):
                self._sort()

    def _sort(self) -> None:
        """Rebuild all places."""
        self._places, self._queue = {}, []
        for server in self._serving:
            self._moved(server)

    def _first(self) -> str:
        """Find the least loaded serving server; of several, that with fewest sessions."""
        while self._places.get(self._queue[0][1]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return self._queue[0][1]

    def _place(self, session: str) -> str:
        """Give the session a home: its trajectory's server, its group's, or the least loaded one."""
        self.forget(session)
        known = [self._last.get(kin, ("", 0)) for kin in _kin(session)]
        fit = (server for server, _ in known if server in self._serving and not self._crowded(server))
        server = next(fit, None) or self._least_loaded()
        self._home[session] = server
        self._sessions[server].add(session)
        self._moved(server)
        for kin, (_, sessions) in zip(_kin(session), known, strict=True):
            self._last[kin] = server, sessions + 1
        return server

    def _least_loaded(self) -> str:
        if not self._serving:
            raise NoServer("no server is serving: all are starting, waiting for weights, or dead")
        return self._first()


def _kin(session: str) -> list[tuple[str, str]]:
    """List what a session shares beginnings with, the nearest first: its trajectory and, with a slash, its group."""
    group = session.rpartition("/")[0]
    return [("trajectory", trajectory_of(session)), *([("group", group)] if group else [])]
