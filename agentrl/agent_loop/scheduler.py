"""Scheduler of many concurrent trajectories.

Invariant: every request ends exactly once, as a scored trajectory or as a counted failure. A failure carries no reward.
At most `max_concurrent` tries run at a time; scoring starts when a trajectory ends and does not hold a place. An error
of a user's code ends the whole run, unless such are to be counted: the trajectories that do not meet it are a biased
sample. The error of an environment at a turn of the policy is counted: the policy's text ends no run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Literal

from agentrl.agent_loop.base import CURRENT_EPISODE, AgentLoop, Episode, LoopContext
from agentrl.agent_loop.limits import seed_of
from agentrl.engines.contract import RequestError, SamplingParams
from agentrl.errors import CodeError, InfrastructureError, UserError
from agentrl.reward import RewardManager, score_all, score_once
from agentrl.system.call_journal import CallJournal
from agentrl.system.cancellation import leaked_cancellation_fails
from agentrl.system.deadline import Clock
from agentrl.system.numbers import finite, number_of
from agentrl.system.quota import run_concurrently
from agentrl.system.throttle import OncePerKey, ThrottledWarnings
from agentrl.system.user_code import await_user_code, contract_error, is_agentrl_code
from agentrl.trajectory import Cause, Status, Trajectory, cause_of
from agentrl.trajectory.origin import Origin
from agentrl.trajectory.sample import Sample

logger = logging.getLogger(__name__)
warnings = ThrottledWarnings(logger)
ADVICE = (
    "It is an error of this code, perhaps one that only some texts of the policy meet, and no fault of the "
    "infrastructure: it would come again. Mend it and start the same command again, or leave such trajectories out and "
    "count them with actor_rollout_ref.rollout.agent.on_code_error=count. For what may pass (a server that is gone) "
    "raise agentrl.errors.InfrastructureError"
)
LEFT_OUT = "Such trajectories are left out, and counted under failure/ in the metrics"
OBSERVER_ADVICE = (
    "Mend it and start the same command again, or go on without what the observer misses with "
    "actor_rollout_ref.rollout.agent.on_code_error=count"
)
NOT_OBSERVED = "The observer missed this; the trajectory is kept"


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to run."""

    uid: str
    group: int
    sample: Sample
    params: SamplingParams
    """Sampling parameters; temperature, top_p, top_k and priority are read."""
    seed: int
    count_drift: bool = False
    """Compare its tokens with a full re-render at the end (costs a render)."""
    baseline: bool = False
    """See `Trajectory.baseline`; it is scored apart from the others of its prompt."""
    origin: Origin | None = None
    """See `Trajectory.origin`."""
    on_begin: Callable[[], None] | None = None
    """Called when it has a place and begins; nothing of it was asked of the engine before."""
    journal: CallJournal | None = None
    """See `Episode.journal`."""
    takes_version: Callable[[int], bool] = lambda version: True
    """See `Episode.takes_version`."""


@dataclass(slots=True)
class _Group:
    """The trajectories of one prompt."""

    requests: list[Request] = field(default_factory=list)
    ended: dict[str, Trajectory] = field(default_factory=dict)
    """By the request's uid."""
    scored: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Scheduler:
    """Runner of trajectories with retries and scoring. `loops` maps agent names to loop objects."""

    context: LoopContext
    loops: Mapping[str, AgentLoop]
    reward: RewardManager | None
    max_concurrent: int
    trajectory_timeout: float
    max_retries: int
    on_code_error: Literal["error", "count"] = "error"
    """End the run at an error of user code, or count it; see `rollout.agent.on_code_error`."""
    warn: Callable[[str], None] = logger.warning
    running: dict[str, Episode] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    """Clock of the trajectories' deadlines."""
    _places: asyncio.Semaphore = field(init=False)
    _is_new_place: OncePerKey = field(default_factory=OncePerKey)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.max_concurrent)

    async def run(
        self, requests: Sequence[Request], on_end: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Run all requests; the result is in their order. `on_end` is called once a trajectory, when it ends.

        Several calls may run at the same time, and then share the places.

        Raises CodeError for the first error of a user's code, unless these are counted; all else is cancelled then.
        """
        groups: defaultdict[tuple[int, bool], _Group] = defaultdict(_Group)
        for request in requests:
            groups[request.group, request.baseline].requests.append(request)
        return await run_concurrently(
            self._run_one(request, groups[request.group, request.baseline], on_end) for request in requests
        )

    async def close(self) -> None:
        """Close the loops, each of them also where another one fails to."""
        async with AsyncExitStack() as stack:
            for loop in self.loops.values():
                stack.push_async_callback(loop.close)

    def waiting_for(self) -> dict[str, int]:
        """Count the running trajectories that wait for no people by what they wait for, most frequent first."""
        running = (one for one in self.running.values() if not self.loops[one.sample.agent_name].waits_for_people)
        return dict(Counter(episode.waiting_for.split(" (")[0] for episode in running).most_common())

    async def _run_one(
        self, request: Request, group: _Group, on_end: Callable[[Trajectory], None] | None
    ) -> Trajectory:
        with leaked_cancellation_fails(f"trajectory {request.uid}"):  # of its group others may wait for this one
            async with self._places:
                if request.on_begin is not None:
                    request.on_begin()
                trajectory = await self._with_retries(request)
            if self.reward is not None and self.reward.by_group:
                await self._score_with_group(self.reward, request, trajectory, group)
            elif self.reward is not None:
                await self._score(self.reward, [trajectory], request, request.journal)
            self.context.observers.on_end(trajectory)
            if (error := self.context.observers.take_error(request.uid)) is not None:
                self._handle_code_error(error, request, OBSERVER_ADVICE, NOT_OBSERVED)
            if on_end is not None:
                on_end(trajectory)
            return trajectory

    async def _score_with_group(
        self, reward: RewardManager, request: Request, trajectory: Trajectory, group: _Group
    ) -> None:
        """Score the whole group where this is its last trajectory to end; else wait until that is done."""
        group.ended[request.uid] = trajectory
        if len(group.ended) < len(group.requests):
            await group.scored.wait()
            return
        try:
            trajectories = [group.ended[one.uid] for one in group.requests]
            await self._score(reward, trajectories, request, group.requests[0].journal)
        finally:
            group.scored.set()

    async def _score(
        self, reward: RewardManager, trajectories: Sequence[Trajectory], request: Request, journal: CallJournal | None
    ) -> None:
        without = (Status.FAILED, Status.TIMEOUT, Status.ABORTED)
        # A trajectory that has a score has it from its loop.
        ended = [one for one in trajectories if one.status not in without and one.score is None]
        try:
            if journal is None or not ended:
                await score_all(reward, ended, request.sample)
            else:
                await score_once(journal, reward, ended, request.sample)
        except CodeError as error:
            self._handle_code_error(error, request)

    async def _with_retries(self, request: Request) -> Trajectory:
        journal = request.journal
        causes: list[str] = [] if journal is None else list(journal.causes)
        while True:
            trajectory, again = await self._try(request, len(causes))
            if journal is not None and journal.mismatch is not None:
                journal.restart(journal.mismatch)
                causes.clear()
                continue
            if not again or len(causes) >= self.max_retries:
                trajectory.metrics["retries"] = float(len(causes))
                trajectory.metrics |= {f"retries/{cause}": float(causes.count(cause)) for cause in causes}
                return trajectory
            causes.append(cause_of(trajectory))
            if journal is not None:
                journal.failed(causes[-1])
            warnings.warn(f"trajectory {request.uid}", f"{trajectory.failure}; try {len(causes) + 1}")

    async def _try(self, request: Request, attempt: int) -> tuple[Trajectory, bool]:
        """Make one try from the start; return the trajectory, and whether it failed in a way that another try may not.

        An exception of the loop is attributed here: it ends the trajectory, and the run where it is an error of a
        user's code.
        """
        sample = request.sample
        trajectory = Trajectory(request.uid, request.group, sample.data_source, sample.agent_name, attempt=attempt)
        trajectory.origin = request.origin
        trajectory.baseline, trajectory.ground_truth = request.baseline, sample.ground_truth
        trajectory.status = Status.FAILED  # until the loop says how it ended
        episode = Episode(
            context=self.context,
            sample=sample,
            trajectory=trajectory,
            params=request.params,
            seed=seed_of(request.seed, attempt),
            session=f"{request.uid}.{attempt}",
            journal=request.journal,
            takes_version=request.takes_version,
        )
        self.running[episode.session] = episode
        CURRENT_EPISODE.set(episode)
        try:
            await self._run_loop(episode)
            if request.count_drift and trajectory.status is Status.COMPLETED:
                await episode.count_drift()
        except CodeError as error:
            if request.journal is None or request.journal.mismatch is None:  # else: a loop that caught what told it so
                self._handle_code_error(error, request)
            fail(trajectory, error)
            return trajectory, False
        except (UserError, RequestError) as error:
            fail(trajectory, error)
            warnings.warn(f"trajectory {request.uid}", f"{trajectory.failure}; it is left out")
            return trajectory, False
        except (Exception, SystemExit) as error:
            fail(trajectory, error)
        finally:
            del self.running[episode.session]
            await self.context.engine.release(episode.session)
        return trajectory, trajectory.status is Status.FAILED

    async def _run_loop(self, episode: Episode) -> None:
        loop, name = self.loops[episode.sample.agent_name], f"agent loop {episode.sample.agent_name}"
        # Tool calls have shorter deadlines of their own, so only a slow engine or server makes a whole trajectory late:
        # it ends without a score. Not `within`, for which see agentrl.system.deadline.
        deadline: asyncio.Timeout | None = None
        try:
            async with self.clock.timeout(math.inf if loop.waits_for_people else self.trajectory_timeout) as deadline:
                try:
                    await await_user_code(name, loop.code, lambda: loop.run(episode), passing=(RequestError,))
                except BaseException:
                    if episode.journal is not None:
                        episode.journal.stop()
                    if episode.tool_session is not None:
                        with suppress(Exception):  # a fault at the end must not hide the first one
                            await episode.tool_session.close()
                    raise
                await episode.close_tools()
        except TimeoutError as error:
            if deadline is None or not deadline.expired():
                # A deadline of a single call (interaction): infrastructure, to be retried.
                raise TimeoutError(f"no answer in time from {episode.waiting_for}") from error
            episode.finish(Status.TIMEOUT)
            passed = f"{self.trajectory_timeout:g} s passed waiting for {episode.waiting_for}"
            episode.trajectory.fail(Cause.TIMEOUT, passed, Status.TIMEOUT)
        problem = _contract_violation(episode.trajectory)
        if problem is not None:
            raise ValueError(problem) if is_agentrl_code(loop.code) else contract_error(name, loop.code, problem)

    def _handle_code_error(
        self, error: CodeError, request: Request, advice: str = ADVICE, outcome: str = LEFT_OUT
    ) -> None:
        """Raise the error with the row that it was met in and `advice`, or warn of it and its `outcome`, once a
        place."""
        met = f"{error}\n  in {request.sample.place}, trajectory {request.uid}"
        if self.on_code_error == "error" and not error.after_turn:
            raise CodeError(f"{met}\n{advice}", error.place) from error
        if self._is_new_place(error.place or error.summary):
            self.warn(f"{met}\n  {outcome}")


def _contract_violation(trajectory: Trajectory) -> str | None:
    """Find values of a loop that no trajectory may have; convert the loop's numbers, of any type, to floats."""
    status = trajectory.status
    if not isinstance(status, Status) or (status is Status.FAILED and trajectory.failure is None):
        return f"it must set the trajectory's status, by `episode.finish(Status...)`; found {status!r:.40}"
    if not trajectory.transcripts and status is not Status.TIMEOUT:
        return "it ended without a transcript: `await episode.start(messages)` begins one"
    for turn in trajectory.turns:
        reward = None if turn.reward is None else finite(turn.reward)
        if reward is None and turn.reward is not None:
            return f"a turn's reward must be a finite number (in float32), found {turn.reward!r:.100}"
        turn.reward = reward
    for numbers in (trajectory.metrics, trajectory.score_extra):
        for name, value in numbers.items():
            if (number := number_of(value)) is None:
                return f"metrics and score_extra hold numbers; {name!r} is {value!r:.100}"
            numbers[name] = number
    return None


def fail(trajectory: Trajectory, error: BaseException) -> None:
    """End a trajectory as a failure, counted under `failure_cause` of the error or its cause, or the error's class."""
    faults = [one for one in (error, error.__cause__) if isinstance(one, InfrastructureError)]  # a tool's is the cause
    named = next((one.failure_cause for one in faults if one.failure_cause), type(error).__name__)
    trajectory.fail(named, error.summary if isinstance(error, CodeError) else error)
