"""Agent loop that trains an agent as it is, written against an OpenAI client.

The agent runs by itself and calls an endpoint in this process, which records every sample of the policy. One server
serves all trajectories; each has a session of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.roles import add_role_scores
from agentrl.agents.agent import Agent, AgentOptions
from agentrl.agents.task import AgentError, AgentFailed, AgentTask, CheckFailed
from agentrl.config import Config
from agentrl.config.registries import AGENT_STARTERS
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.openai_api.selection import KEY, Kind, Selection, SessionTranscript, leave_out, main_of, train_of
from agentrl.remote.credentials import check_set
from agentrl.reward.reported import REPORTED
from agentrl.system.threads import beside_loop
from agentrl.system.throttle import ThrottledWarnings
from agentrl.tool import ToolSchema
from agentrl.trajectory import ROLE, Message, Status
from agentrl.trajectory.picture import size_of
from agentrl.trajectory.sample import Sample

if TYPE_CHECKING:
    from agentrl.openai_api.endpoint import Endpoint
    from agentrl.openai_api.session import Session

warnings = ThrottledWarnings(logging.getLogger(__name__))
AGENT_EXIT_SECONDS = 5.0
"""Seconds that a cancelled agent has to end."""
FIRST_TRIES = 8
"""First tries that show whether the agent works at all: where all of them fail in the same way, it does not.

Later tries may fail by the policy's text, which must not be able to end a run.
"""

WHEN_TOO_LONG = (
    "The context is data.max_prompt_length and data.max_response_length together, or rollout.max_model_len. Raise "
    "them, as far as the model has positions, or have the agent send less, e.g. fewer tools (docs/harnesses.md)"
)

SHOWN = ("prompt", "extra_info", "data_source", "ability", "index")
"""Fields of a sample that an agent is given, with the trajectory's origin: all but how it is scored."""
_QUOTES = str.maketrans("", "", "\\'\"")
"""Deletes quotes, which clients escape when they show an answer."""


class OpenAIProxyLoop(AgentLoop):
    """Loop that runs the agent against a session of the endpoint.

    The agent is loaded, and the server started, when the first trajectory needs them.
    """

    def __init__(self, options: AgentOptions | None = None) -> None:
        self.options = options or AgentOptions()
        self._agent: Agent | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._endpoint: asyncio.Task[Endpoint] | None = None
        self._selection: Selection | None = None
        self._config: RolloutsConfig | None = None
        self._refuses_scores: str | None = None
        """Why the run takes no score of a single transcript."""
        self._begun = 0
        self._first_failures: list[str] = []
        """Reasons of the first tries that failed for an error of the agent."""

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        """Return the row's prompt; the agent's own messages and tools are only known when it runs."""
        return sample.prompt, []

    def configure(self, config: RolloutsConfig) -> None:
        self._config = config

    def check(self) -> None:
        """Load the agent, and the function that chooses transcripts. Raises ConfigError when that fails."""
        if self._selection is None:
            self._selection = Selection(train_of(self.options.train, self.options.harness))
            if self._config is not None:
                self._check_roles(self._config, self._selection)
            if isinstance(self._config, Config):
                from agentrl.algorithms.advantages import why_no_scores

                self._refuses_scores = why_no_scores(self._config.algorithm)
        if self._agent is None:
            check_set("openai_proxy.pass_env", self.options.pass_env)
            build = cast(Callable[[AgentOptions], Agent], AGENT_STARTERS.get(self.options.start))
            self._agent = build(self.options)

    def _check_roles(self, config: RolloutsConfig, selection: Selection) -> None:
        if config.actor_rollout_ref.rollout.roles and selection.is_main:
            raise ConfigError(
                f"{KEY}: main chooses one conversation, and each role of actor_rollout_ref.rollout.roles has its own. "
                f"Name roles, e.g. {KEY}=[{next(iter(config.actor_rollout_ref.rollout.roles))}], or take all"
            )

    async def run(self, episode: Episode) -> None:
        self.check()
        assert self._agent is not None
        is_first, self._begun = self._begun < FIRST_TRIES, self._begun + 1
        endpoint = await self._started(self._agent)
        episode.waiting_for = "the agent"
        async with endpoint.session(episode) as (session, base_url):
            session.refuses_scores = self._refuses_scores
            report, error = await self._run_agent(self._agent, endpoint, session, base_url)
            if error is None and "score" not in report and not session.over.is_set():
                await self._late_score(session)
        if session.fault is not None:
            raise session.fault
        # A program that went on after a used-up budget may still end with a status that tells of it.
        is_judged = isinstance(error, AgentFailed | AgentError) and error.is_own_end and "score" in error.report
        is_told_of = is_judged and "openai_refused" in episode.trajectory.metrics
        if isinstance(error, InfrastructureError) and not isinstance(error, AgentFailed):
            raise error  # A place failed, e.g. a container. How the session had ended before does not excuse it.
        is_excused = session.ending is not Status.COMPLETED or session.stopped is not None or is_told_of
        if isinstance(error, CheckFailed) or (error is not None and not is_excused):
            raise self._blamed(self._agent, error, session.last_error, is_first=is_first)
        if not session.turns and session.ending is Status.COMPLETED:
            raise self._agent.error(f"it made no successful call; {session.last_error or 'it made none at all'}")
        if session.ending is Status.LENGTH and not episode.trajectory.transcripts:
            said = f"agent: no request of it fitted into the context. {session.last_error} {WHEN_TOO_LONG}"
            raise self._blamed(self._agent, AgentError(said, "no request of it fitted"), None, is_first=is_first)
        if session.ending is Status.COMPLETED and session.undelivered and not episode.trajectory.num_sampled:
            problem = "it left every answer of the policy before it was delivered, so nothing of this try is trained on"
            raise AgentError(f"agent: {problem}", problem)
        if (nothing := await self._select(session)) is not None:
            failure = AgentError(f"agent: {nothing}", f"{KEY} chose nothing")
            raise self._blamed(self._agent, failure, None, is_first=is_first)
        numbers = {**session.feedback, **report}  # The agent's own word stands.
        if differ := [name for name, number in session.feedback.items() if number != numbers[name]]:
            session.count("openai_scores_differ")
            said = ", ".join(f"{name}: {report[name]:g} and {session.feedback[name]:g}" for name in differ)
            warnings.warn(
                f"ALARM: trajectory {episode.trajectory.uid}",
                f"what its agent returned is not what was posted to its session ({said}). The agent's word stands; "
                "find out who else knows the session's report_url",
            )
        if "reward" in numbers:
            episode.add_turn_reward(numbers.pop("reward"))
        if episode.context.roles and (error is None or any(name.startswith(ROLE) for name in numbers)):
            scores = {name.removeprefix(ROLE): numbers.pop(name) for name in list(numbers) if name.startswith(ROLE)}
            try:
                numbers["score"] = add_role_scores(episode.trajectory, scores)
            except ValueError as problem:
                raise self._agent.error(f"it reports {ROLE}NAME for each role that played: {problem}") from problem
        if "score" in numbers:
            numbers[REPORTED] = numbers.pop("score")
        episode.trajectory.score_extra.update(numbers)
        episode.finish(session.ending)

    async def _select(self, session: Session) -> str | None:
        """Count the session's transcripts, and leave out transcripts that are not trained on.

        Returns why nothing of it is trained on; None where something is.
        """
        trajectory, transcripts = session.episode.trajectory, session.transcripts()
        texts = sum(size_of(one.messages) for one in transcripts) if len(transcripts) > 1 else 0
        main = await beside_loop(texts, partial(main_of, transcripts, by_tools=self.options.harness is not None))
        transcripts = [replace(one, kind=main[one.number][0]) if one.number in main else one for one in transcripts]
        _count(session, transcripts)
        assert self._selection is not None
        if self._selection.everything or not any(one.answers for one in transcripts):
            return None
        ends = self._selection.ends(transcripts, main)
        if not any(end >= answer.end for one in transcripts if (end := ends.get(one.number)) for answer in one.answers):
            return self._selection.nothing(transcripts)
        session.count("left_out/side_calls", leave_out(trajectory, transcripts, ends))
        return None

    async def _late_score(self, session: Session) -> None:
        """Wait for a score that is posted after the agent's end."""
        if self.options.feedback_timeout > 0:
            session.episode.waiting_for = "feedback"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.scored.wait(), self.options.feedback_timeout)

    def _blamed(self, agent: Agent, error: Exception, refusal: str | None, *, is_first: bool) -> Exception:
        """Return the error that ends the try, or the run; `refusal`: the endpoint's last refusal."""
        is_refused = refusal is not None and refusal.translate(_QUOTES) in str(error).translate(_QUOTES)
        if refusal is not None and is_refused and isinstance(error, AgentFailed):
            # Another server may refuse the policy's text; this endpoint refuses only requests of the agent.
            error = agent.refused(error, refusal)
        if isinstance(error, AgentError) and is_first:
            self._first_failures.append(error.reason)
            if len(self._first_failures) == FIRST_TRIES and len(set(self._first_failures)) == 1:
                return agent.error(f"all of its first {FIRST_TRIES} tries failed for {error.reason}\n{error}")
        return error

    async def close(self) -> None:
        if self._endpoint is not None and self._loop is asyncio.get_running_loop():
            assert self._agent is not None
            await self._agent.close()
            await (await self._endpoint).close()
        self._endpoint = self._loop = None

    async def _run_agent(
        self, agent: Agent, endpoint: Endpoint, session: Session, base_url: str
    ) -> tuple[dict[str, float], Exception | None]:
        """Run the agent; return its report, and the error that it ended with. It is ended at once when its engine
        failed."""
        from agentrl.openai_api.images import as_sent

        shown = {name: getattr(session.episode.sample, name) for name in SHOWN}
        shown["prompt"] = as_sent(session.episode.sample.prompt)
        if (origin := session.episode.trajectory.origin) is not None:
            shown["origin"] = {"uid": origin.uid, **asdict(origin)}
        # A copy: agents may write into it, and rows are read again.
        metrics = session.episode.trajectory.metrics
        report_url = endpoint.report_url(session)
        task = AgentTask(copy.deepcopy(shown), base_url, report_url, session.called, metrics)
        task = replace(task, door=partial(endpoint.door, task.token))
        running = asyncio.ensure_future(agent.run(task))
        over = asyncio.create_task(session.over.wait())
        try:
            await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                return {}, None
            return running.result(), None
        except Exception as error:
            return dict(error.report) if isinstance(error, AgentFailed | AgentError) else {}, error
        finally:
            over.cancel()
            running.cancel()
            # A coroutine may refuse to be cancelled; its session ends.
            await asyncio.wait({running}, timeout=AGENT_EXIT_SECONDS)
            if running.done() and not running.cancelled():
                running.exception()

    async def _started(self, agent: Agent) -> Endpoint:
        loop = asyncio.get_running_loop()
        if self._endpoint is None or self._loop is not loop:
            self._loop, self._endpoint = loop, loop.create_task(_start(self.options, agent))
        return await asyncio.shield(self._endpoint)


def _count(session: Session, transcripts: Sequence[SessionTranscript]) -> None:
    """Count transcripts with samples by their kind, and side calls by why they were opened, too."""
    sampled = [one for one in transcripts if one.answers]
    session.count("openai_transcripts", len(sampled))
    for kind, name in ((Kind.SUB_AGENT, "openai_sub_agents"), (Kind.SIDE_CALL, "openai_side_calls")):
        if number := sum(one.kind is kind for one in sampled):
            session.count(name, number)
    for one in sampled:
        if one.kind is Kind.SIDE_CALL:
            session.count(f"openai_side_calls/{one.opened}")


async def _start(options: AgentOptions, agent: Agent) -> Endpoint:
    from agentrl.openai_api.endpoint import Endpoint

    endpoint = Endpoint(options.host, options.port, strict=options.strict)
    await endpoint.start()
    await agent.start(endpoint.queue)
    return endpoint
