"""Runs many trajectories at once.

Invariant: every request ends exactly once, as a scored trajectory or as a counted failure. A failure carries no
reward. At most `max_concurrent` tries run at a time; scoring starts when a trajectory ends and does not hold a place.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.agent_loop.base import AgentLoop, Episode, LoopContext
from agentrl.agent_loop.limits import seed_of
from agentrl.data.sample import Sample
from agentrl.errors import UserError
from agentrl.recurring import Recurring
from agentrl.reward import RewardManager
from agentrl.rollout.engine import RequestError, SamplingParams
from agentrl.trajectory import Status, Trajectory, is_reward

warnings = Recurring(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to run."""

    uid: str
    group: int
    sample: Sample
    params: SamplingParams
    """Only temperature, top_p and top_k are read."""
    seed: int
    count_drift: bool = False
    """Compare its tokens with a full re-render at the end (costs a render)."""


@dataclass(slots=True)
class Scheduler:
    """See the module. `loops` maps agent names to loop objects."""

    context: LoopContext
    loops: Mapping[str, AgentLoop]
    reward: RewardManager | None
    max_concurrent: int
    trajectory_timeout: float
    max_retries: int
    running: dict[str, Episode] = field(default_factory=dict)

    async def run(
        self, requests: Sequence[Request], on_end: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Run all requests; the result is in their order. `on_end` is called once a trajectory, when it ends."""
        places = asyncio.Semaphore(self.max_concurrent)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_one(request, places, on_end)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """End what loops hold."""
        for loop in self.loops.values():
            await loop.close()

    def waiting_for(self) -> dict[str, int]:
        """What the running trajectories wait for, most frequent first."""
        return dict(Counter(episode.waiting_for.split(" (")[0] for episode in self.running.values()).most_common())

    async def _run_one(
        self, request: Request, places: asyncio.Semaphore, on_end: Callable[[Trajectory], None] | None
    ) -> Trajectory:
        async with places:
            trajectory = await self._with_retries(request)
        if self.reward is not None and trajectory.status not in (Status.FAILED, Status.TIMEOUT, Status.ABORTED):
            await self.reward.score(trajectory, request.sample)
        if on_end is not None:
            on_end(trajectory)
        return trajectory

    async def _with_retries(self, request: Request) -> Trajectory:
        attempt = 0
        while True:
            trajectory, again = await self._try(request, attempt)
            if not again or attempt >= self.max_retries:
                trajectory.metrics["retries"] = float(attempt)
                return trajectory
            attempt += 1
            warnings.warn(f"trajectory {request.uid}", f"{trajectory.failure}; try {attempt + 1}")

    async def _try(self, request: Request, attempt: int) -> tuple[Trajectory, bool]:
        """One try from the start, and whether it failed in a way that another may not.

        Exceptions of the loop are attributed here, and only here: they end the trajectory, never the run.
        """
        sample = request.sample
        trajectory = Trajectory(request.uid, request.group, sample.data_source, sample.agent_name)
        episode = Episode(
            context=self.context,
            sample=sample,
            trajectory=trajectory,
            params=request.params,
            seed=seed_of(request.seed, attempt),
            session=f"{request.uid}.{attempt}",
        )
        self.running[episode.session] = episode
        try:
            await self._run_loop(episode)
            if request.count_drift and trajectory.status is Status.COMPLETED:
                episode.count_drift()
        except (UserError, RequestError) as error:
            fail(trajectory, error)
            return trajectory, False
        except (Exception, SystemExit) as error:
            fail(trajectory, error)
        finally:
            del self.running[episode.session]
            await self.context.engine.release(episode.session)
        return trajectory, trajectory.status is Status.FAILED

    async def _run_loop(self, episode: Episode) -> None:
        loop = self.loops[episode.sample.agent_name]
        deadline = asyncio.timeout(self.trajectory_timeout)
        try:
            async with deadline:
                await loop.run(episode)
                check_turn_rewards(episode.trajectory)
        except TimeoutError as error:
            if not deadline.expired():
                # A deadline of a single call (interaction): infrastructure, to be retried.
                raise TimeoutError(f"no answer in time from {episode.waiting_for}") from error
            episode.finish(Status.TIMEOUT)
            episode.trajectory.failure = (
                f"timeout: {self.trajectory_timeout:g} s passed waiting for {episode.waiting_for}"
            )


def check_turn_rewards(trajectory: Trajectory) -> None:
    """Raises ValueError for one that cannot be trained on, whoever gave it: tool, interaction, agent, cassette."""
    for number, turn in enumerate(trajectory.turns):
        if turn.reward is not None and not is_reward(turn.reward):
            raise ValueError(f"turn {number} ({turn.role}): the reward is {turn.reward}, no finite number (in float32)")


def fail(trajectory: Trajectory, error: BaseException) -> None:
    """End a trajectory as an infrastructure failure: without score, never trained on."""
    trajectory.status = Status.FAILED
    trajectory.score = None
    trajectory.failure = f"{type(error).__name__}: {error}"
