"""Simulated training over many steps: rollouts and updates in turn, overlapped, and with slow trajectories thrown away.

    python -m benchmarks.cluster.async_simulation --nodes 8 --prompts 512 --steps 12
    python -m benchmarks.cluster.async_simulation --help

Which prompts begin and which batch takes them is decided by the trainer's own schedule
(`agentrl/rollouts/staleness_scheduler.py`), which server runs a request by its own router. Servers, trajectories and
the arithmetic of an update are those of `step_simulation.py`; with GPUs of their own for rollouts, each way is tried
with several divisions of the GPUs and the fastest is shown. No GPU is needed, and none has been asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from agentrl.engines.servers.router import Router
from agentrl.rollouts.staleness_scheduler import GroupStatus, NotReady, Settings, StalenessScheduler
from agentrl.trajectory.staleness import staleness
from benchmarks.cluster.simulated_servers import Clock, Request, Session, SimulatedServer, Speed
from benchmarks.cluster.step_simulation import Trajectories, add_options, made, shape_of
from benchmarks.cluster.step_times import Cluster, Options, Plan, Training

DIVISIONS = (0.25, 0.5, 0.75)
"""Parts of the GPUs that only generate, of which the best is shown."""


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


WAYS = (
    Way("in turn, shared GPUs", shared=True),
    Way("in turn", 0),
    Way("in turn, the slowest fifth discarded", discarded=0.2),
    Way("partial: K 1, shared GPUs", 1, 1, shared=True),
    Way("partial: K 4, depth 1, shared GPUs", 4, 1, shared=True),
    Way("one step off: K 1", 1, 1),
    Way("asynchronous: K 2", 2, 2),
    Way("asynchronous: K 4, depth 1", 4, 1),
    Way("asynchronous: K 4", 4, 4),
    Way("asynchronous: K 8, depth 2", 8, 2),
    Way("asynchronous: K 16, depth 8, every 4th version published", 16, 8, 4),
    Way("asynchronous: K 24, depth 12, every 4th version published", 24, 12, 4),
)


class Steps(Options):
    """Extent of the simulation."""

    steps: int = 16
    """Steps that are run. The first ones, of which more batches are begun than taken, are not counted."""
    ways: str = ""
    """Only ways whose names have this in them."""
    division: float = 0.0
    """Part of the GPUs that only generate; 0: the best of several."""


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
    """Seconds in which servers that never wait for anything sample what a counted step trains on."""

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
        """Prompts one of which has to end before there is a batch; empty: not known."""
        self.trained: dict[int, bool] = {}
        """By ordinal, of all prompts whose status is known."""
        self.alone: dict[int, float] = {}

    def run(self) -> None:
        self._admit()
        self._clock.run(lambda: len(self._ends) > self._steps)

    def seen(self, sampled: float) -> Seen:
        """Return what the counted steps took, beside servers that sample so many tokens a second, all together."""
        ends, first = self._ends, min(self._way.bound + 2, self._steps // 2)
        seconds = (ends[-1] - ends[first]) / (len(ends) - 1 - first)
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
        """Abort what has not ended."""
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
        passes = training.forward("old_log_prob", sessions), training.update("update_actor", sessions), training.save()
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
        """Send weights to one part of the servers after the other, read anew for each; the trainer waits for the last.

        It does not wait for the contexts that servers compute anew.
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

    With more, contexts are computed anew that had no room in its cache while their tools ran.
    """
    best, at_once = 0.0, 16
    while (found := Saturated(speed, draw, at_once).sampled()) > best:
        best, at_once = found, at_once + max(1, at_once // 5)
    return best


class Comparison:
    """Ways of one training on one cluster, over the same prompts."""

    def __init__(self, cluster: Cluster, plan: Plan, model: str, draw: Draw, given: Steps) -> None:
        self._cluster, self._plan, self._shape, self._draw, self._given = cluster, plan, shape_of(model), draw, given
        self._sampled: dict[float, float] = {}
        """By the part of a GPU that a server takes: tokens that it samples in a second if it never waits."""

    def best(self, way: Way) -> Seen:
        """Run a way on shared GPUs, or on each division of them; the fastest."""
        gpus, tp = self._cluster.gpus, self._plan.tp
        parts = [self._given.division] if self._given.division else DIVISIONS
        apart = sorted({min(max(tp, round(part * gpus / tp) * tp), gpus - 1) for part in parts})
        return min((self._run(way, one) for one in ([0] if way.shared else apart)), key=lambda one: one.seconds)

    def _run(self, way: Way, rollout_gpus: int) -> Seen:
        # GPUs that only generate have nothing else to hold.
        memory = 0.85 if rollout_gpus else self._plan.engine_memory
        plan = self._plan.model_copy(update={"rollout_gpus": rollout_gpus, "engine_memory": memory})
        training = Training(self._cluster, plan, self._shape)
        simulation = Simulation(training, way, self._draw, self._given.steps)
        simulation.run()
        if plan.engine_memory not in self._sampled:
            self._sampled[plan.engine_memory] = sampled_alone(training.speed(), self._draw)
        return simulation.seen(training.servers * self._sampled[plan.engine_memory])


def drawn(trajectories: Trajectories, plan: Plan, seed: int) -> Draw:
    """Each prompt's trajectories, the same however often and in whatever order they are asked for."""

    def draw(ordinal: int) -> list[Session]:
        one = plan.model_copy(update={"prompts": 1})
        sessions = trajectories.draw(one, random.Random(f"{seed}/{ordinal}"))
        for number, session in enumerate(sessions):
            session.group, session.name = ordinal, f"train/{ordinal}/{number}"
        return sessions

    return draw


def table(runs: Sequence[Seen]) -> Table:
    made = Table(box=box.SIMPLE)
    for title in (
        "",
        "GPUs that generate",
        "step, s",
        "against in turn",
        "rollouts alone, s",
        "update alone, s",
        "reached",
        "servers busy",
        "trainer busy",
    ):
        made.add_column(title, justify="right" if title else "left")
    for title in ("stale mean", "most", "longest tenth trained", "others"):
        made.add_column(title, justify="right")
    turn = min((one.seconds for one in runs if not one.way.bound and not one.way.discarded), default=runs[0].seconds)
    for one in runs:
        made.add_row(
            one.way.name,
            str(one.rollout_gpus) if not one.way.shared else "all",
            f"{one.seconds:.3g}",
            f"{turn / one.seconds:.2f}",
            f"{one.rollout:.3g}",
            f"{one.update:.3g}",
            f"{one.reached:.2f}",
            f"{one.engine_busy:.0%}",
            f"{one.trainer_busy:.0%}",
            f"{one.staleness_mean:.2f}",
            str(one.staleness_max),
            f"{one.longest:.0%}",
            f"{one.others:.0%}",
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="Qwen2.5-7B", help="as of step_simulation, or the path of a config.json")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for kind in (Cluster, Plan, Trajectories, Steps):
        add_options(parser, kind)
    arguments = parser.parse_args()
    cluster, plan, given = made(Cluster, arguments), made(Plan, arguments), made(Steps, arguments)
    ways = [way for way in WAYS if given.ways in way.name]
    if not ways:
        parser.error(f"--ways {given.ways!r} is in no name; known: {'; '.join(way.name for way in WAYS)}")
    draw = drawn(made(Trajectories, arguments), plan, arguments.seed)
    runs = []
    try:
        comparison = Comparison(cluster, plan, arguments.model, draw, given)
        for way in ways:
            print(f"simulating: {way.name}", file=sys.stderr)
            runs.append(comparison.best(way))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(one) | {"reached": one.reached} for one in runs], indent=1))
    else:
        Console(width=180).print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
