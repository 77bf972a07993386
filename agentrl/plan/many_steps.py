"""Many steps simulated: rollouts and updates in turn, overlapped, and with slow trajectories discarded.

The trainer's own schedule (`agentrl/rollouts/staleness_scheduler.py`) decides which prompts begin and which batch takes
them, and its router chooses the servers of a request. Servers, trajectories and the arithmetic of an update are those
of `rollout_times.py` and `step_times.py`.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.engines.servers.router import Router
from agentrl.plan.simulated_servers import Clock, Lengths, Request, Session, SimulatedServer, Speed, workload
from agentrl.plan.step_times import Options, Plan, Training
from agentrl.rollouts.staleness_scheduler import GroupStatus, NotReady, Settings, StalenessScheduler
from agentrl.trajectory.staleness import staleness


class Trajectories(Options):
    """Trajectories to draw where no recorded ones are given: (median, sigma) of log-normal distributions."""

    system: int = 500
    """Tokens that all prompts begin with."""
    prompt: int = 300
    """Median tokens of a prompt after that; sigma 0.5."""
    answer: int = 600
    """Median tokens that are sampled in a turn."""
    answer_sigma: float = 0.9
    answer_most: int = 8192
    turns: float = 3.0
    """Mean turns of a trajectory."""
    turns_most: int = 12
    observation: int = 300
    """Median tokens of a tool's answer; sigma 1."""
    tool_seconds: float = 1.0
    """Median; sigma 1.2, at most 60."""
    response_most: int = 16384
    """Tokens after the prompt, at which a trajectory is cut (data.max_response_length)."""

    def draw(self, plan: Plan, rng: random.Random) -> list[Session]:
        more = max(0.0, 1 - 1 / self.turns)
        lengths = Lengths(
            system=self.system,
            question=(self.prompt, 0.5, 10, 20 * self.prompt),
            answer=(self.answer, self.answer_sigma, 1, self.answer_most),
            observation=(self.observation, 1.0, 1, 20 * self.observation),
            tool_seconds=(self.tool_seconds, 1.2, 0.0, 60),
            more_turns=(more, more),
            most_turns=self.turns_most,
        )
        sessions = workload(plan.prompts * plan.n, plan.n, lengths, rng)
        for session in sessions:
            cut(session, self.response_most)
        return sessions


def cut(session: Session, most: int) -> None:
    """Let a session that has not begun end after `most` tokens, in the midst of an answer or before it."""
    answers: list[int] = []
    for answer, observed in zip(session.answers, [0, *session.observations], strict=True):
        most -= observed
        if most <= 0:
            break
        answers.append(min(answer, most))
        most -= answers[-1]
    turns = len(answers)
    session.answers, session.left = answers, answers[0]
    session.observations, session.tools = session.observations[: turns - 1], session.tools[: turns - 1]


@dataclass(frozen=True, slots=True)
class Way:
    """How rollouts and updates share time and GPUs."""

    name: str
    bound: int = 0
    """async_training.max_staleness, K."""
    depth: int = 0
    publish_every: int = 1
    """async_training.publish_every, T."""
    shared: bool = False
    """The same GPUs generate and train: nothing is sampled during an update."""
    discarded: float = 0.0
    """Part of the prompts, the last ones to end, that is begun in vain at each step; K = 0 only."""


@dataclass(slots=True)
class Seen:
    """One way's run."""

    way: Way
    rollout_gpus: int
    seconds: float = 0.0
    """A step, mean over the counted ones."""
    engine_busy: float = 0.0
    trainer_busy: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    longest: float = 0.0
    """Part of the longest tenth of the prompts, by what they would take alone, that was trained on."""
    others: float = 0.0
    update: float = 0.0
    """Seconds of a counted step's update if batches are always there: log-probs, update, a checkpoint's share, and, as
    often as the way does it, weights sent to all servers at once."""
    rollout: float = 0.0
    """Seconds in which servers that never wait for anything sample the tokens of a counted step."""

    @property
    def reached(self) -> float:
        """The longer of rollouts alone and update alone, over what a step took: 1 where all else costs nothing.

        On shared GPUs, where they cannot overlap, their sum.
        """
        return (self.rollout + self.update if self.way.shared else max(self.rollout, self.update)) / self.seconds


@dataclass(slots=True)
class Prompt:
    """A prompt that was begun."""

    sessions: list[Session]
    left: int
    alone: float
    """Seconds that its longest trajectory takes on servers that have nothing else to do."""
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """(version that was served when a turn began, its tokens)."""


Draw = Callable[[int], list[Session]]


def drawn(trajectories: Trajectories, plan: Plan, seed: int) -> Draw:
    """Each prompt's trajectories, the same in every order of the ordinals."""

    def draw(ordinal: int) -> list[Session]:
        one = plan.model_copy(update={"prompts": 1})
        sessions = trajectories.draw(one, random.Random(f"{seed}/{ordinal}"))
        for number, session in enumerate(sessions):
            session.group, session.name = ordinal, f"train/{ordinal}/{number}"
        return sessions

    return draw


class Simulation:
    """One way of training on one division of the GPUs."""

    def __init__(self, training: Training, way: Way, draw: Draw, steps: int) -> None:
        plan = training.plan
        self._training, self._way, self._draw = training, way, draw
        self._speed = training.speed()
        self._wanted, self._steps = plan.prompts, steps
        begun = round(plan.prompts / (1 - way.discarded))
        self._schedule = StalenessScheduler(
            Settings(begun, steps + way.depth + 1, way.bound, way.depth, way.publish_every)
        )
        self._clock, self._router = Clock(), Router()
        self._fleet = {
            f"server {number}": SimulatedServer(f"server {number}", self._clock, self._speed, 0)
            for number in range(training.servers)
        }
        self._router.set_serving(self._fleet)
        self._prompts: dict[int, Prompt] = {}
        self._queue: deque[Session] = deque()
        self._running: set[int] = set()
        """Trajectories that have begun and not ended, by id."""
        self._ends, self._stale = list[float](), list[tuple[int, int]]()
        self._tokens, self._updates = list[int](), list[float]()
        """By step: tokens that it trains on; seconds of its update."""
        self._publishing = False
        self._full: StalenessScheduler | None = None
        """State in which nothing more was admitted: asked again when it changes."""
        self._needed = frozenset[int]()
        """Prompts, one must end before there is a batch; empty: not known."""
        self.trained: dict[int, bool] = {}
        """By ordinal, of all prompts whose status is known."""
        self.alone: dict[int, float] = {}

    def run(self) -> None:
        self._admit()
        self._clock.run(lambda: len(self._ends) > self._steps)

    @property
    def seconds(self) -> float:
        """Mean of a counted step."""
        ends, first = self._ends, self._uncounted
        return (ends[-1] - ends[first]) / (len(ends) - 1 - first)

    @property
    def seconds_a_token(self) -> float:
        """Seconds of the counted steps over the sampled tokens that they train on: the first batches of a large bound
        have the shortest trajectories."""
        ends, first = self._ends, self._uncounted
        return (ends[-1] - ends[first]) / sum(self._tokens[first + 1 : len(ends)])

    @property
    def _uncounted(self) -> int:
        """First steps, in which more batches begin than are taken."""
        return min(self._way.bound + 2, self._steps // 2)

    def seen(self, sampled: float) -> Seen:
        """Compare the counted steps with servers that sample `sampled` tokens a second, all together."""
        ends, first, seconds = self._ends, self._uncounted, self.seconds
        updates, counted = self._updates[first + 1 : len(ends)], self._tokens[first + 1 : len(ends)]
        busy = statistics.mean(server.totals.busy for server in self._fleet.values()) / self._clock.now
        tokens = sum(count for _, count in self._stale)
        known = sorted(self.trained, key=lambda ordinal: self.alone[ordinal])
        cut = len(known) * 9 // 10
        others, longest = ([self.trained[one] for one in part] for part in (known[:cut], known[cut:]))
        return Seen(
            self._way,
            self._training.plan.rollout_gpus,
            seconds,
            busy,
            sum(self._updates) / self._clock.now,
            sum(stale * count for stale, count in self._stale) / max(tokens, 1),
            max((stale for stale, _ in self._stale), default=0),
            statistics.mean(longest),
            statistics.mean(others),
            statistics.mean(updates) + self._training.sync().seconds / self._way.publish_every,
            statistics.mean(counted) / sampled,
        )

    def _admit(self) -> None:
        while self._schedule is not self._full and self._schedule.can_admit:
            ordinal, self._needed = self._schedule.next_ordinal, frozenset()
            self._schedule = self._schedule.admit()
            sessions = self._draw(ordinal)
            self.alone[ordinal] = alone = max(self._seconds_alone(session) for session in sessions)
            self._prompts[ordinal] = Prompt(sessions, len(sessions), alone)
            self._queue.extend(sessions)
        self._full = self._schedule
        while self._queue and len(self._running) < self._training.plan.concurrent:
            session = self._queue.popleft()
            if self._prompts[session.group].left == len(self._prompts[session.group].sessions) and not any(
                id(one) in self._running for one in self._prompts[session.group].sessions
            ):
                self._schedule, self._needed = self._schedule.begin(session.group), frozenset()
            self._running.add(id(session))
            self._ask(session)

    def _seconds_alone(self, session: Session) -> float:
        return sum(session.answers) * (self._speed.step_fixed + self._speed.step_each) + sum(session.tools)

    def _ask(self, session: Session) -> None:
        if id(session) not in self._running:
            return
        name = self._router.route(session.name)
        self._prompts[session.group].tokens.append((self._schedule.served, session.answers[session.turn]))
        self._fleet[name].submit(Request(session, self._clock.now, lambda request: self._answered(request, name)))

    def _answered(self, request: Request, name: str) -> None:
        session = request.session
        self._router.done(session.name, name)
        if (seconds := session.next_turn()) is not None:
            self._clock.after(seconds, lambda: self._ask(session))
            return
        self._router.forget(session.name)
        self._running.discard(id(session))
        prompt = self._prompts[session.group]
        prompt.left -= 1
        if not prompt.left:
            self._schedule, _ = self._schedule.finish(session.group, GroupStatus.SCORED, None)
            if self._way.discarded and len(self._schedule.ready) == self._wanted:
                self._discard()
            if not self._needed or session.group in self._needed:
                self._take()
        self._admit()

    def _discard(self) -> None:
        """Abort all trajectories that run."""
        for server in self._fleet.values():
            server.fail_all()
        self._router = Router()
        self._router.set_serving(self._fleet)
        self._running.clear()
        self._queue.clear()
        for group in self._schedule.groups:
            if group.outcome is None:
                self._schedule, _ = self._schedule.finish(group.ordinal, GroupStatus.TIMEOUT, None)

    def _take(self) -> None:
        schedule = self._schedule
        if (
            schedule.updating
            or self._publishing
            or len(self._ends) > self._steps
            or schedule.step >= schedule.settings.last_step
        ):
            return
        batch = schedule.take()
        if isinstance(batch, NotReady):
            self._needed = frozenset(batch.ordinals)
            return
        trained = [one for one, status in batch.statuses.items() if status == "trained"]
        self.trained |= {one: one in trained for one in batch.statuses}
        prompts = [self._prompts.pop(one) for one in batch.statuses]
        sessions = [session for prompt in prompts if not prompt.left for session in prompt.sessions]
        self._stale += [
            (staleness(version, schedule.version), count) for one in prompts for version, count in one.tokens
        ]
        self._schedule = batch.schedule
        if self._way.shared:
            for server in self._fleet.values():
                server.hold()
        self._admit()
        training = self._training
        passes = [*training.passes(sessions), training.save()]
        self._updates.append(sum(stage.seconds for stage in passes))
        self._tokens.append(sum(sum(session.answers) for session in sessions))
        self._clock.after(self._updates[-1], self._updated)

    def _updated(self) -> None:
        self._schedule = self._schedule.updated(self._schedule.version + 1)
        if self._schedule.publish_is_due or self._way.shared:
            servers, self._publishing = list(self._fleet.values()), True
            rolling = bool(self._way.bound) and not self._way.shared and len(servers) > 1
            self._send([servers[::2], servers[1::2]] if rolling else [servers])
        else:
            self._next_step()

    def _send(self, parts: list[list[SimulatedServer]]) -> None:
        """Send weights to one part of the servers after the other, read again for each; the trainer waits for the last.

        It does not wait for the contexts that servers compute again.
        """
        if not parts:
            self._schedule, self._publishing = self._schedule.publish(), False
            self._next_step()
            return
        seconds = self._training.sync().seconds
        for server in parts[0]:
            server.take_weights(seconds)
        self._clock.after(seconds, lambda: self._send(parts[1:]))

    def _next_step(self) -> None:
        self._ends.append(self._clock.now)
        self._admit()
        self._take()


class Saturated:
    """One server that always has so many trajectories: each that ends is replaced at once, and no weights come."""

    def __init__(self, speed: Speed, draw: Draw, at_once: int) -> None:
        self._clock, self._at_once = Clock(), at_once
        self._server = SimulatedServer("one", self._clock, speed, 0)
        self._sessions = (session for ordinal in itertools.count() for session in draw(ordinal))
        self._ended = self._tokens = 0

    def sampled(self) -> float:
        """Run it, and return the tokens that it samples in a second, its warm-up left out."""
        for _ in range(self._at_once):
            self._ask(next(self._sessions))
        self._clock.run(lambda: self._ended >= 4 * self._at_once)
        since, tokens = self._clock.now, self._tokens
        self._clock.run(lambda: self._ended >= 20 * self._at_once)
        return (self._tokens - tokens) / (self._clock.now - since)

    def _ask(self, session: Session) -> None:
        self._server.submit(Request(session, self._clock.now, self._answered))

    def _answered(self, request: Request) -> None:
        session = request.session
        self._tokens += session.answers[session.turn]
        if (seconds := session.next_turn()) is not None:
            self._clock.after(seconds, lambda: self._ask(session))
            return
        self._ended += 1
        self._ask(next(self._sessions))


def sampled_alone(speed: Speed, draw: Draw) -> float:
    """Tokens that a server samples in a second if it never waits, with that number of trajectories that suits it best.

    With more, contexts are computed again that had no room in its cache while their tools ran.
    """
    best, at_once = 0.0, 16
    while (found := Saturated(speed, draw, at_once).sampled()) > best:
        best, at_once = found, at_once + max(1, at_once // 5)
    return best
