"""Which server runs a session's next request: the one that has its prefix in the cache, else the least loaded one.

A session keeps its server from its first request until `forget`, until the server stops serving (whatever comes back
has an empty cache, so its sessions are routed by load), or until the server has a queue while another is half idle
(waiting costs more than computing the prefix again). Load is requests in flight; of equally loaded servers, the one
with fewest sessions is taken, so that servers fill evenly. No I/O, no clock: the same calls give the same routes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from agentrl.rollout.engine import EngineError


class NoServer(EngineError):
    """No server is serving now; one may be later."""


class Router:
    """Routes of the requests in flight, and the sessions' servers. `capacity`: requests that one server runs at once.

    `route` takes constant time for a session that stays, time linear in the servers for one that is placed.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a server must run at least one request at once")
        self._capacity = capacity
        self._serving: dict[str, None] = {}
        self._sessions: dict[str, set[str]] = {}
        """By serving server: the sessions whose prefix it has."""
        self._home: dict[str, str] = {}
        """By session: the server whose set it is in."""
        self._loads: dict[str, int] = {}
        self._in_flight: Counter[tuple[str, str]] = Counter()

    def set_serving(self, servers: Collection[str]) -> None:
        """These may be routed to from now on; the sessions of all others are placed anew at their next request."""
        for server in self._serving.keys() - set(servers):
            for session in self._sessions.pop(server):
                del self._home[session]
        self._serving = dict.fromkeys(servers)
        for server in self._serving:
            self._sessions.setdefault(server, set())
            self._loads.setdefault(server, 0)
        self._loads = {s: load for s, load in self._loads.items() if load or s in self._serving}

    @property
    def serving(self) -> Collection[str]:
        """Those that may be routed to."""
        return self._serving.keys()

    def route(self, session: str) -> str:
        """The server for the session's next request, which is in flight there until `done`. Raises NoServer."""
        server = self._home.get(session)
        if server is None:
            server = self._place(session, self._least_loaded())
        elif self._loads[server] >= self._capacity:
            other = self._least_loaded()
            if self._loads[other] * 2 <= self._capacity:
                self.forget(session)
                server = self._place(session, other)
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

    def forget(self, session: str) -> None:
        """The session is over. Its requests in flight count until they are `done`. Unknown is no error."""
        server = self._home.pop(session, None)
        if server is not None:
            self._sessions[server].discard(session)

    @property
    def loads(self) -> Mapping[str, int]:
        """Requests in flight by server: all that serve, and those that do not any more but still have some."""
        return MappingProxyType(self._loads)

    def _least_loaded(self) -> str:
        if not self._serving:
            raise NoServer("no server is serving: all are starting, waiting for weights, or dead")
        loads, sessions = self._loads, self._sessions
        return min(self._serving, key=lambda server: (loads[server], len(sessions[server])))

    def _place(self, session: str, server: str) -> str:
        self._home[session] = server
        self._sessions[server].add(session)
        return server
