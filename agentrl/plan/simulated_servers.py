"""Inference servers and trajectories as a discrete-event model: no GPU, no sockets, no real time.

A server runs prefills first, one after another, at a constant rate; otherwise one decode step after another, in which
each of its n running requests gets one token in `step_fixed + n * step_each + tokens * step_token` seconds, of the
tokens that they all have so far. A request waits for one of
`max_running` places and for room in the KV cache. What no running request uses stays cached until room is needed, least
recently used first: a session's context, and the prompt that the trajectories of a group share.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace


class Clock:
    """Simulated time in seconds, and what happens when. Events of one moment run in the order they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass(frozen=True, slots=True)
class Speed:
    """One server: roughly a 7 B model in bf16 on one GPU of 80 GB."""

    prefill: float = 20_000.0
    """Tokens a second."""
    prefill_fixed: float = 0.005
    """Seconds a prefill, besides its tokens."""
    step_fixed: float = 0.012
    step_each: float = 0.00006
    step_token: float = 0.0
    max_running: int = 256
    kv_tokens: int = 600_000

    def step(self, running: int, tokens: float) -> float:
        """Seconds of a decode step of so many requests, which have so many tokens in all."""
        return self.step_fixed + running * self.step_each + tokens * self.step_token


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens and seconds by log-normal distributions: (median, sigma, least, most)."""

    system: int = 800
    """The same for all: instructions and tools."""
    question: tuple[float, float, float, float] = (400, 0.8, 50, 4000)
    answer: tuple[float, float, float, float] = (250, 0.9, 16, 4096)
    """Sampled in a turn."""
    observation: tuple[float, float, float, float] = (300, 1.0, 10, 4000)
    tool_seconds: tuple[float, float, float, float] = (1.0, 1.2, 0.01, 60)
    more_turns: tuple[float, float] = (0.65, 0.9)
    """Chance of a further turn: drawn for each group between these, because some tasks are longer than others."""
    most_turns: int = 12
    group_sigma: float = 0.5
    """All answers of a group are longer or shorter by a factor of log-normal distribution, for the same reason."""


@dataclass(slots=True)
class Session:
    """A trajectory: its answers, its observations, and its progress."""

    name: str
    group: int
    prompt: int
    answers: list[int]
    observations: list[int]
    tools: list[float]
    turn: int = 0
    context: int = 0
    """Tokens it has so far."""
    left: int = 0
    """Tokens of this turn's answer still to be sampled; less than all of it where a server died in between."""
    repeated: bool = False
    """This turn was begun on another server."""

    def next_turn(self) -> float | None:
        """Go over to the next turn. Returns the seconds of tools before it; None: that was the last one."""
        turn, self.turn = self.turn, self.turn + 1
        if self.turn == len(self.answers):
            return None
        self.left = self.answers[self.turn]
        self.context += self.observations[turn]
        return self.tools[turn]


def workload(trajectories: int, group_size: int, lengths: Lengths, rng: random.Random) -> list[Session]:
    """Trajectories in the order in which they start; the `group_size` trajectories of a group share their prompt."""

    def draw(distribution: tuple[float, float, float, float]) -> float:
        median, sigma, least, most = distribution
        return min(max(median * rng.lognormvariate(0, sigma), least), most)

    sessions = []
    for i in range(trajectories):
        if i % group_size == 0:
            prompt = lengths.system + int(draw(lengths.question))
            factor = rng.lognormvariate(0, lengths.group_sigma)
            more = rng.uniform(*lengths.more_turns)
        turns = 1
        while turns < lengths.most_turns and rng.random() < more:
            turns += 1
        answers = [max(1, int(draw(lengths.answer) * factor)) for _ in range(turns)]
        observations = [int(draw(lengths.observation)) for _ in range(turns - 1)]
        tools = [draw(lengths.tool_seconds) for _ in range(turns - 1)]
        group, member = divmod(i, group_size)
        name = f"train/1/{group}/{member}.0"
        sessions.append(Session(name, group, prompt, answers, observations, tools, context=prompt, left=answers[0]))
    return sessions


@dataclass(slots=True)
class Totals:
    """Totals of a server's life. Tokens of prompts, but for `turns` (requests after a session's first turn)."""

    busy: float = 0.0
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    turns: int = 0
    hits: int = 0
    """Requests of `turns` that found the session's whole context, but for the observation, in the cache."""
    later_prompt: int = 0
    later_cached: int = 0
    waited: float = 0.0
    """Seconds before the prefill, over all requests."""


@dataclass(slots=True, eq=False)
class Request:
    session: Session
    arrived: float
    finished: Callable[[Request], None]
    begun: Callable[[Request], None] = field(default=lambda request: None)
    size: int = 0
    """KV tokens of its own."""


class SimulatedServer:
    """One server. `up` and `frozen` are its faults: not there; there, but getting nowhere."""

    def __init__(self, name: str, clock: Clock, speed: Speed, system: int) -> None:
        self.name = name
        self.up = True
        self.frozen = False
        self.totals = Totals()
        self._clock, self._speed, self._system = clock, speed, system
        self._order = itertools.count()
        self._epoch = 0
        self._holds = 0
        self._clear()

    def _clear(self) -> None:
        self._waiting: deque[Request] = deque()
        self._prefilling: Request | None = None
        self._running: list[tuple[float, int, Request]] = []
        """Running requests, a heap by the step count at which each ends."""
        self._steps, self._since = 0.0, self._clock.now
        self._context, self._pace = 0.0, 1.0
        """Tokens of all running requests; seconds a step, until the next event."""
        self._cache: OrderedDict[str | int, int] = OrderedDict()
        """Tokens by session name or group number that no running request uses."""
        self._cached = self._used = 0

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        if self._prefilling is None and not self.frozen:
            self._proceed()

    def fail_all(self) -> list[Request]:
        """Its requests break, in order; each session keeps the tokens that were sampled. The cache is lost."""
        self._advance()
        broken = []
        for end, _, request in sorted(self._running, key=lambda entry: entry[1]):
            sampled = request.session.left - max(1, round(end - self._steps))
            request.session.context += sampled
            request.session.left -= sampled
            broken.append(request)
        broken += [self._prefilling] if self._prefilling else []
        broken += self._waiting
        self._epoch += 1
        self._clear()
        return broken

    def freeze(self) -> None:
        self._advance()
        self.frozen = True
        self._epoch += 1

    def slow_down(self, times: float) -> None:
        """Make the server slower by a factor, from its next step on."""
        self._advance()
        speed = self._speed
        self._speed = replace(
            speed,
            prefill=speed.prefill / times,
            step_fixed=speed.step_fixed * times,
            step_each=speed.step_each * times,
            step_token=speed.step_token * times,
        )
        if self._running and self._prefilling is None:
            self._proceed()

    def come_up(self) -> None:
        self.up, self.frozen = True, False
        self._clear()

    def hold(self) -> None:
        """Stand still with all requests until `take_weights`, also where earlier weights are not yet taken."""
        self._holds += 1
        self.freeze()

    def take_weights(self, seconds: float) -> float:
        """Stand still while weights come, then compute all keys and values again and continue. Returns the seconds."""
        if not self.frozen:
            self.freeze()
        self._cache.clear()
        self._cached = 0
        seconds += (self._context + sum(r.session.context for r in self._begun())) / self._speed.prefill
        holds = self._holds
        self._clock.after(seconds, lambda: self._go_on(holds))
        return seconds

    def _begun(self) -> list[Request]:
        """The request whose prefill was interrupted, if any: it is begun again."""
        return [self._prefilling] if self._prefilling else []

    def _go_on(self, holds: int) -> None:
        if holds != self._holds:
            return
        self.frozen, self._since = False, self._clock.now
        if self._prefilling is None:
            self._proceed()
            return
        self._epoch += 1
        epoch = self._epoch
        self._clock.after(self._speed.prefill_fixed, lambda: self._prefilled(epoch))

    def _advance(self) -> None:
        now = self._clock.now
        if self._prefilling is not None or self._running:
            if not self.frozen:
                self.totals.busy += now - self._since
            if self._prefilling is None and not self.frozen:
                steps = (now - self._since) / self._pace
                self._steps += steps
                self._context += steps * len(self._running)
        self._since = now

    def _step_seconds(self, steps: float) -> float:
        """The mean of the next `steps` steps, in which contexts grow."""
        running = len(self._running)
        return self._speed.step(running, self._context + running * steps / 2)

    def _proceed(self) -> None:
        """Begin a prefill if there is one to begin, else let decode steps continue to the next end of a request."""
        self._advance()
        self._epoch += 1
        epoch = self._epoch
        if self._waiting and len(self._running) < self._speed.max_running and self._admit(self._waiting[0]):
            self._prefilling = request = self._waiting.popleft()
            new = request.session.context - self._cached_of(request)
            seconds = self._speed.prefill_fixed + new / self._speed.prefill
            self._clock.after(seconds, lambda: self._prefilled(epoch))
        elif self._running:
            steps = max(0.0, self._running[0][0] - self._steps)
            self._pace = self._step_seconds(steps)
            self._clock.after(steps * self._pace, lambda: self._decoded(epoch))

    def _admit(self, request: Request) -> bool:
        session = request.session
        size = session.context + session.left - session.prompt
        if self._used and self._used + size > self._speed.kv_tokens:
            return False
        request.size = size
        return True

    def _cached_of(self, request: Request) -> int:
        """Tokens of its prompt that are cached; what it needs is taken from the cache's room."""
        session, totals = request.session, self.totals
        own = self._cache.pop(session.name, None)
        shared = session.group in self._cache
        if own is not None:
            self._cached -= own
            hit = session.prompt + own
        elif shared:
            hit = session.prompt - 1
        else:
            hit = self._system if totals.requests else 0
        if shared:
            self._cache.move_to_end(session.group)
        else:
            self._cache[session.group] = session.prompt
            self._cached += session.prompt
        self._used += request.size
        while self._cache and self._used + self._cached > self._speed.kv_tokens:
            self._cached -= self._cache.popitem(last=False)[1]
        totals.requests += 1
        totals.waited += self._clock.now - request.arrived
        totals.prompt += session.context
        totals.cached += hit
        if session.turn and not session.repeated:
            totals.turns += 1
            totals.hits += hit + session.observations[session.turn - 1] >= session.context
            totals.later_prompt += session.context
            totals.later_cached += hit
        return hit

    def _prefilled(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._advance()
        request, self._prefilling = self._prefilling, None
        assert request is not None
        heapq.heappush(self._running, (self._steps + request.session.left, next(self._order), request))
        self._context += request.session.context
        request.begun(request)
        self._proceed()

    def _decoded(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._advance()
        _, _, request = heapq.heappop(self._running)
        session = request.session
        self._used -= request.size
        self._cache[session.name] = request.size
        self._cached += request.size
        session.context += session.left
        session.left = 0
        self._context -= session.context
        self._proceed()
        request.finished(request)
