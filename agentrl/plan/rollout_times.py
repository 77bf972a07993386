"""How long a step's rollouts take: trajectories of several turns, with tools, on simulated servers.

The router is the real one; servers and trajectories are defined in `simulated_servers.py`. Trajectories are drawn, or
come from a run's parquet files, or have the lengths that a file lists.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.engines.servers.router import Router
from agentrl.plan.simulated_servers import Clock, Request, Session, SimulatedServer, Speed
from agentrl.trajectory import Trajectory, Transcript
from agentrl.trajectory.files import FileName
from agentrl.trajectory.parquet import read_trajectories


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """Seconds from the step's begin, but for the last two."""

    half: float
    """Time at which half of the trajectories had ended."""
    most: float
    """Time at which 95 % of the trajectories had ended; what comes after is the long tail."""
    all: float
    tools: float
    """Mean seconds that a trajectory waited for its tools."""
    busy: float
    """Part of the time in which a server computed, mean over the servers."""


def simulate(
    sessions: Sequence[Session], servers: int, speed: Speed, *, concurrent: int, system: int = 0
) -> RolloutTimes:
    """Run all sessions, `concurrent` at once; `system` tokens are the beginning of every prompt."""
    clock, router = Clock(), Router()
    fleet = {f"server {number}": SimulatedServer(f"server {number}", clock, speed, system) for number in range(servers)}
    router.set_serving(fleet)
    waiting, ends = deque(sessions), list[float]()

    def begin() -> None:
        if waiting:
            ask(waiting.popleft())

    def ask(session: Session) -> None:
        name = router.route(session.name)
        fleet[name].submit(Request(session, clock.now, lambda request: answered(request, name)))

    def answered(request: Request, name: str) -> None:
        session = request.session
        router.done(session.name, name)
        router.served(name, session.answers[session.turn], clock.now - request.arrived)
        if (seconds := session.next_turn()) is not None:
            clock.after(seconds, lambda: ask(session))
            return
        router.forget(session.name)
        ends.append(clock.now)
        begin()

    for _ in range(min(concurrent, len(waiting))):
        begin()
    clock.run(lambda: len(ends) == len(sessions))
    busy = sum(server.totals.busy for server in fleet.values()) / servers / clock.now
    tools = sum(sum(session.tools) for session in sessions) / len(sessions)
    return RolloutTimes(ends[(len(ends) - 1) // 2], ends[(len(ends) - 1) * 95 // 100], clock.now, tools, busy)


def recorded(path: Path) -> Iterator[list[Session]]:
    """Yield the steps that have a session, the newest first: of one file of trajectories, or of all of a folder.

    Each transcript is a session; a transcript without a sampled token is left out.
    """
    steps = defaultdict[int, list[Path]](list)
    for file in sorted(path.glob("train_*.parquet")) if path.is_dir() else [path]:
        name = FileName.read(file.name)
        steps[0 if name is None else name.step].append(file)
    for step in sorted(steps, reverse=True):
        if found := [one for file in steps[step] for each in read_trajectories(file) for one in of_trajectory(each)]:
            yield found


def of_trajectory(trajectory: Trajectory) -> list[Session]:
    """Its transcripts. The calls of a turn run side by side, so the turn waits for the slowest one."""
    sessions = []
    for number, transcript in enumerate(trajectory.transcripts):
        answers, observations = runs(transcript)
        called = [turn.calls for turn in trajectory.turns if turn.calls and turn.transcript == number]
        waits = [max(call.seconds for call in calls) for calls in called]
        if answers:
            tools = (waits + [0.0] * len(observations))[: len(observations)]
            name, prompt = f"{trajectory.group}/{trajectory.uid.replace('/', '-')}.{number}", transcript.prompt_length
            sessions.append(
                Session(name, trajectory.group, prompt, answers, observations, tools, context=prompt, left=answers[0])
            )
    return sessions


def runs(transcript: Transcript) -> tuple[list[int], list[int]]:
    """Lengths of sampled runs after the prompt, and of observed runs between them; the last run is a sampled one."""
    mask = transcript.mask[transcript.prompt_length :]
    lengths = [(bool(sampled), len(list(run))) for sampled, run in itertools.groupby(mask)]
    answers = [length for sampled, length in lengths if sampled]
    return answers, [length for sampled, length in lengths if not sampled][: len(answers) - 1]


def listed(path: Path, trajectories: int, group_size: int, prompt: int, rng: random.Random) -> list[Session]:
    """Trajectories of one turn, whose lengths are drawn from a file that has one number of tokens a line."""
    lengths = [int(line) for line in path.read_text(encoding="utf-8").split()]
    sessions = []
    for number in range(trajectories):
        group, member = divmod(number, group_size)
        answer = max(1, rng.choice(lengths))
        sessions.append(Session(f"{group}/{member}", group, prompt, [answer], [], [], context=prompt, left=answer))
    return sessions


def final_lengths(sessions: Sequence[Session]) -> list[int]:
    """Tokens of each trajectory at its end."""
    return [session.prompt + sum(session.answers) + sum(session.observations) for session in sessions]
