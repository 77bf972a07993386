"""State machine of the servers: events in, due actions out, without I/O, tasks or a clock of its own.

    STARTING  launched, has not answered yet                 Check until it answers, or `start_timeout` is over
    HEALTHY   answers, and was sent the target weights       Check every `check_interval`
    STALE     answers, was not sent the target weights       SendWeights
    DEAD      exited, or failed `failures` times in a row    after a back-off: Restart, or Check if it is not ours

Only weights that were sent count. A server has the target version because `updated` was called since its last start,
never because it claims to. So a process that restarts with the first weights cannot pass for a current one. A claim of
another version makes it STALE. Until the first `target`, the weights that servers were launched with are right.

`due` hands out at most one action a server. The action is outstanding until its own event (`answered`, `updated`,
`started`, or `failed` with that action), or until its time is over, which counts as its failure. Only a Check is
withdrawn before that, where it became pointless (the server exited, or needs weights first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf


class FleetState(StrEnum):
    STARTING = "starting"
    HEALTHY = "healthy"
    STALE = "stale"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Check:
    """Check that the server answers. Report `answered`, or `failed` after at most `check_timeout`."""

    server: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Kill the rest of the process and launch it again. Report `started` (before it answers) or `failed`."""

    server: str


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Send the weights of `version`. Report `updated` or `failed`."""

    server: str
    version: int


Action = Check | Restart | SendWeights


@dataclass(frozen=True, slots=True)
class Timings:
    """Intervals, limits and timeouts of a fleet, in seconds where they are times."""

    check_interval: float = 10.0
    """Time between two checks of a healthy server."""
    recheck_interval: float = 1.0
    """Time until a failed check or transfer is tried again, and between two checks of a starting server."""
    check_timeout: float = 10.0
    failures: int = 3
    """Failed checks (or transfers, or requests without a served one between them) in a row that make a server dead.
    Requests that fail between two checks count as one: they broke together."""
    start_timeout: float = 900.0
    """Time from launch to the first answer: loading the weights, compiling, capturing graphs."""
    update_timeout: float = 900.0
    backoff: float = 1.0
    """Time to wait after a death; doubles with every further one within `restart_window`, up to `backoff_limit`. A
    failed restart is a death, and so is a failed check of a dead server."""
    backoff_limit: float = 60.0
    restarts: int = 5
    """Most restarts within `restart_window`; a server that dies once more stays dead. 0: no server is restarted."""
    restart_window: float = 1800.0


@dataclass(slots=True)
class _Server:
    state: FleetState
    since: float
    """Time of its launch."""
    next_at: float
    """Time when its next action is due."""
    reason: str = "not yet checked"
    version: int | None = None
    """Version of the weights that were sent since its last start."""
    failures: int = 0
    """Failed checks or transfers in a row."""
    request_failures: int = 0
    suspect: bool = False
    """A request failed since the last check."""
    action: Action | None = None
    """The outstanding action."""
    deadline: float = inf
    """Time when that action has failed."""
    deaths: list[float] = field(default_factory=list)
    """Times of deaths within the last `restart_window`."""
    exchanging: bool = False
    """True while it is paused to be sent weights."""


class Fleet:
    """Keeps the servers' states and returns due actions. Every method raises KeyError for an unknown server.

    `clock` gives seconds. `restartable`: the processes are ours, so that a dead one can be launched again; other
    servers are checked, and sent weights when they answer.
    """

    def __init__(
        self, servers: Sequence[str], clock: Callable[[], float], *, restartable: bool, timings: Timings | None = None
    ) -> None:
        self.timings = timings or Timings()
        self._clock = clock
        self._restartable = restartable
        self._target: int | None = None
        self._incoming: int | None = None
        """Version that servers are sent in turn, besides the target."""
        self.sendable = True
        """Weights can be sent: `due` asks for it. They cannot while they are being changed."""
        now = clock()
        self._servers = {name: _Server(FleetState.STARTING, since=now, next_at=now) for name in servers}

    # Events

    def started(self, server: str) -> None:
        """Report that the server's process was launched (again); it does not answer yet."""
        s = self._servers[server]
        self._end(s, Restart, Check)
        s.state, s.reason = FleetState.STARTING, "launched, no answer yet"
        s.since = s.next_at = self._clock()
        self._clear(s)

    def answered(self, server: str, version: int | None) -> None:
        """Report an answer. `version`: the weights that the server claims to have; None where it was not asked."""
        s = self._servers[server]
        self._end(s, Check)
        if s.state is FleetState.DEAD and self._restartable:
            return
        s.failures, s.suspect = 0, False
        if s.state is FleetState.HEALTHY and None not in (version, self._target) and version != self._target:
            self._make_stale(s, f"has the weights of version {version} instead of {self._target}")
        elif s.state is not FleetState.STALE:
            self._settle(s)

    def served(self, server: str) -> None:
        """Report that a request to the server succeeded."""
        self._servers[server].request_failures = 0

    def failed(self, server: str, reason: str, action: Action | None = None) -> None:
        """Report that a request failed, or `action`, the very object that `due` returned."""
        s = self._servers[server]
        if action is None:
            self._request_failed(s, reason)
        elif s.action is action:
            self._action_failed(s, reason)

    def exited(self, server: str, reason: str) -> None:
        """Report that the server's process is gone."""
        s = self._servers[server]
        self._end(s, Check)
        if s.state is not FleetState.DEAD:
            self._die(s, reason)

    def exchanging(self, servers: Sequence[str]) -> None:
        """Report that servers are paused to be sent weights: until `exchanged` nothing is due there."""
        for name in servers:
            self._servers[name].exchanging = True
            self._end(self._servers[name], Check)

    def exchanged(self, servers: Sequence[str]) -> None:
        """Report the end of what `exchanging` began."""
        for name in servers:
            self._servers[name].exchanging = False

    def updated(self, server: str, version: int) -> None:
        """Report that the server was sent all weights of `version`."""
        s = self._servers[server]
        self._end(s, SendWeights)
        if s.state in (FleetState.HEALTHY, FleetState.STALE):
            s.version = version
            s.failures, s.suspect = 0, False  # it has answered
            self._settle(s)

    def target(self, version: int) -> None:
        """Set the version that servers must have; servers that were not sent it become stale."""
        self._target, self._incoming = version, None
        for s in self._servers.values():
            if s.state in (FleetState.HEALTHY, FleetState.STALE):
                self._settle(s)

    def stale(self, server: str, reason: str = "generated with older weights than it was sent") -> None:
        """Report that the server has not the weights that it should have, or nobody knows which."""
        s = self._servers[server]
        if s.state is FleetState.HEALTHY and self._target is not None:
            self._make_stale(s, reason)

    def rolls_to(self, version: int, launched: int = 0) -> None:
        """Report that servers are sent `version` in turn: until it is the target, they serve with either.

        launched: version of the weights that they were launched with, where there is no target yet.
        """
        self._incoming = version
        if self._target is None:
            self._target = launched
            for s in self._servers.values():
                s.version = launched if s.state is FleetState.HEALTHY else None
        for s in self._servers.values():  # a server may have taken a version that is not rolled to any more
            if s.state is FleetState.HEALTHY and s.version not in (self._target, version):
                self._make_stale(s, f"waits for the weights of version {self._target}")

    def postponed(self, server: str) -> None:
        """Report that the weights could not be sent for now (see `sendable`)."""
        self._end(self._servers[server], SendWeights)

    # Questions

    def version(self, server: str) -> int:
        """Version of the weights that a healthy server was sent last; 0 before the first `target`."""
        return self._servers[server].version or 0

    def state(self, server: str) -> FleetState:
        """State of the server."""
        return self._servers[server].state

    def reason(self, server: str) -> str:
        """Reason why the server does not serve, or its last failure; empty when all is well."""
        return self._servers[server].reason

    @property
    def serving(self) -> list[str]:
        """Servers that requests may go to: the healthy ones."""
        return [name for name, s in self._servers.items() if s.state is FleetState.HEALTHY]

    def outstanding(self, server: str) -> Action | None:
        """Action that `due` returned for the server and that has not ended yet."""
        return self._servers[server].action

    def is_exchanging(self, server: str) -> bool:
        """True between `exchanging` and `exchanged`."""
        return self._servers[server].exchanging

    def suspect(self, server: str) -> bool:
        """True when a request failed at a serving server and no check has answered since: better wait for that."""
        return self._servers[server].suspect

    @property
    def hopeless(self) -> bool:
        """True when all servers are dead and no server will be launched or checked again."""
        return all(s.state is FleetState.DEAD and s.next_at == inf and s.action is None for s in self._servers.values())

    def due(self) -> list[Action]:
        """Return what to do now, at most one action a server. Each is outstanding from here on.

        Call it every second or so.
        """
        now = self._clock()
        actions: list[Action] = []
        for name, s in self._servers.items():
            if s.action is not None and now >= s.deadline:
                self._action_failed(s, f"{type(s.action).__name__} took longer than {self._time_for(s.action):g} s")
            if s.state is FleetState.STARTING and now >= s.since + self.timings.start_timeout:
                self._end(s, Check)
                self._die(s, f"no answer within {self.timings.start_timeout:g} s of its launch: {s.reason}")
            waits = s.exchanging or (s.state is FleetState.STALE and not self.sendable)
            if s.action is None and now >= s.next_at and not waits:
                s.action = self._next_action(name, s)
                s.deadline = now + self._time_for(s.action)
                actions.append(s.action)
        return actions

    # Transitions

    def _settle(self, s: _Server) -> None:
        """Make an answering server healthy or stale, by the weights that it was sent."""
        if self._target is not None and (s.version is None or s.version not in (self._target, self._incoming)):
            self._make_stale(s, f"waits for the weights of version {self._target}")
            return
        s.state, s.reason = FleetState.HEALTHY, ""
        s.next_at = self._clock() + self.timings.check_interval

    def _make_stale(self, s: _Server, reason: str) -> None:
        self._end(s, Check)
        s.state, s.reason, s.version = FleetState.STALE, reason, None
        s.next_at = self._clock()

    def _die(self, s: _Server, reason: str) -> None:
        now = self._clock()
        s.state, s.reason = FleetState.DEAD, reason
        self._clear(s)
        window, restarts = self.timings.restart_window, self.timings.restarts
        s.deaths = [at for at in s.deaths if at > now - window] + [now]
        if self._restartable and len(s.deaths) > restarts:
            s.next_at = inf
            s.reason += f" (stays dead: {restarts} restarts within {window:g} s did not help)"
        else:
            s.next_at = now + min(self.timings.backoff * 2.0 ** (len(s.deaths) - 1), self.timings.backoff_limit)

    def _request_failed(self, s: _Server, reason: str) -> None:
        if s.state is not FleetState.HEALTHY or s.suspect:
            return
        s.reason, s.suspect = reason, True
        s.request_failures += 1
        s.next_at = self._clock()
        if s.request_failures >= self.timings.failures:
            self._end(s, Check)
            self._die(s, reason)

    def _action_failed(self, s: _Server, reason: str) -> None:
        action, s.action = s.action, None
        if s.state is FleetState.DEAD:
            if not isinstance(action, SendWeights):  # it failed because the server had died
                self._die(s, reason)
            return
        s.reason, s.suspect = reason, False
        s.next_at = self._clock() + self.timings.recheck_interval
        if s.state is not FleetState.STARTING:
            s.failures += 1
            if s.failures >= self.timings.failures:
                self._die(s, reason)

    def _next_action(self, name: str, s: _Server) -> Action:
        if s.state is FleetState.STALE:
            assert self._target is not None
            return SendWeights(name, self._target)
        if s.state is FleetState.DEAD and self._restartable:
            return Restart(name)
        return Check(name)

    def _time_for(self, action: Action) -> float:
        match action:
            case Check():
                return self.timings.check_timeout
            case Restart():
                return self.timings.start_timeout
            case SendWeights():
                return self.timings.update_timeout

    @staticmethod
    def _end(s: _Server, *kinds: type[Action]) -> None:
        """End the outstanding action, if it is of these kinds."""
        if isinstance(s.action, kinds):
            s.action, s.deadline = None, inf

    @staticmethod
    def _clear(s: _Server) -> None:
        """Reset the counters of a process that is gone."""
        s.version, s.failures, s.request_failures, s.suspect = None, 0, 0, False
