"""Loop that plays episodes of a sidecar: its tools, its observations as turns, its rewards, its end."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.compactor import observing
from agentrl.agent_loop.dialogue import with_opening
from agentrl.agent_loop.roles import add_role_scores, problem_of
from agentrl.agent_loop.stopping import after_calls, after_turn
from agentrl.agent_loop.tool_calls import answer_to, record_calls
from agentrl.chat import ParsedCall
from agentrl.config.sections.roles import RoleConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.environments.sidecar import EnvironmentOptions, Fields, Play, RefusedRow, Sidecar
from agentrl.errors import ConfigError, DataError, UserError
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.system.throttle import ThrottledWarnings
from agentrl.tool import ToolSchema
from agentrl.tool.answers import over_limit, refusal
from agentrl.tool.arguments import ArgumentCheck
from agentrl.trajectory import FROZEN, Message, Status, ToolAnswer, ToolCallRecord
from agentrl.trajectory.sample import Sample

warnings = ThrottledWarnings(logging.getLogger(__name__))

COLUMN = "environment"
"""Key of `extra_info` that holds a row's task, as JSON text."""


class NoScore(UserError):
    """End of an episode to which its environment gave no score. The trajectory is left out and counted."""


@dataclass(frozen=True, slots=True)
class Task:
    """A row's task, as the environment listed it."""

    entry: str | None
    """Name of the entry that the row was made with; None in rows of earlier versions, which do not have it."""
    fields: Fields
    seed: int
    tools: list[ToolSchema]
    checks: dict[str, ArgumentCheck]
    """Checks of the arguments, by tool."""
    roles: tuple[str, ...]
    """Roles of the episode's players; empty where the policy plays alone."""

    @property
    def name(self) -> str:
        """Name of the task in messages."""
        return str(self.fields.get("id", "without id"))


@functools.lru_cache(maxsize=4096)
def read_task(text: str) -> Task:
    """Read the JSON of a row's task. Raises ValueError."""
    try:
        found = as_object(json.loads(text))
        is_old = "task" in found  # of a version before 2026-11-28
        entry, fields = (None, found["task"]) if is_old else (found["entry"], found["data"])
        seed = found["seed"]
    except (KeyError, ValueError) as error:
        wanted = "JSON with `entry`, `index`, `seed` and `data`"
        raise ValueError(f"expected {wanted}, found {text[:80]!r} ({error!r})") from error
    if not isinstance(fields, dict) or not isinstance(seed, int) or not isinstance(entry, str | None):
        raise ValueError(f"expected a text, an integer and an object as `entry`, `seed`, `data`, found {text[:80]!r}")
    return Task(entry, fields, seed, *tools_of(fields), roles_of(fields))


def tools_of(task: Fields) -> tuple[list[ToolSchema], dict[str, ArgumentCheck]]:
    """Return the schemas of a task's tools, and the check of each one's arguments. Raises ValueError."""
    schemas: list[ToolSchema] = as_list(task.get("tools"))  # type: ignore[assignment]  # checked by ArgumentCheck
    try:
        checks = [ArgumentCheck(schema) for schema in schemas]
    except ConfigError as error:
        raise ValueError(f"tools: {error}") from error
    return schemas, {schema["function"]["name"]: check for schema, check in zip(schemas, checks, strict=True)}


def roles_of(task: Fields) -> tuple[str, ...]:
    """Return the roles of a task. Raises ValueError."""
    found = task.get("roles", [])
    roles = [role for role in found if isinstance(role, str) and role] if isinstance(found, list) else []
    if not isinstance(found, list) or len(set(roles)) < len(found):
        raise ValueError(f"expected a list of different names as `roles`, found {found!r:.80}")
    return tuple(roles)


class EnvironmentLoop(AgentLoop):
    """Loop of an environment's entry. The environment runs in a process of its own.

    After a kill the episode is played again with the recorded turns: an environment that answers otherwise than before
    makes the trajectory restart.
    """

    takes_images = False
    compacts = True

    def __init__(self, options: EnvironmentOptions) -> None:
        self._sidecar = Sidecar(options)
        self._roles: Mapping[str, RoleConfig] = {}
        self._file = "FILE"
        """YAML with the entry."""

    def configure(self, config: RolloutsConfig) -> None:
        self._roles = config.actor_rollout_ref.rollout.roles
        self._file = config.actor_rollout_ref.rollout.agent.agent_loop_config_path or self._file

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        """Return the row's prompt and the tools of its task. Raises DataError, also for a role that nobody plays."""
        task = self._task(sample)
        if task.roles and (problem := problem_of(task.roles, self._roles)) is not None:
            raise DataError(f"{sample.place}: {problem}")
        return sample.prompt, task.tools

    def check(self) -> None:
        """Start the sidecar. Raises ConfigError with its last lines when that fails."""
        self._sidecar.start()

    async def close(self) -> None:
        await self._sidecar.close()

    async def run(self, episode: Episode) -> None:
        sample = episode.sample
        task, sidecar = self._task(sample), self._sidecar
        episode.waiting_for = f"environment {sidecar.name}"
        address = await sidecar.ready()
        place = f"task {task.name} ({sample.place})"
        play = Play(sidecar, address, episode.context.limits.call_timeout, place)
        try:
            try:
                opening = await play.start(task.fields, task.seed)
            except RefusedRow as error:
                raise self._refusal(sample, str(error)) from error
            if opening is not None:
                opening = (await self._cut(episode, play, opening)).text
            if task.roles:
                status, numbers = await self._play_roles(episode, play, task, opening)
            else:
                prompt = sample.prompt if opening is None else with_opening(sample.prompt, opening)
                episode.state = opening
                await episode.start(prompt, task.tools)
                status = await self._converse(episode, play, task)
                numbers = await play.score()
            if "score" not in numbers:
                raise NoScore(f"environment {sidecar.name}: {place} ended without a reward, so it has no score")
        finally:
            closing = asyncio.ensure_future(play.close())
            await asyncio.shield(closing)
        extra = episode.trajectory.score_extra
        extra |= numbers
        extra["interaction_score"] = extra.pop("score")
        extra["interaction_turn_score"] = sum(turn.reward or 0.0 for turn in episode.trajectory.turns)
        episode.finish(status)

    async def _converse(self, episode: Episode, play: Play, task: Task) -> Status:
        limits, observe = episode.context.limits, observing(episode)
        if episode.budget_left <= 0:
            raise _no_room(play)
        while True:
            reply = await episode.generate()
            if (ended := after_turn(episode, reply)) is not None:
                return ended
            calls = reply.message.calls
            messages = await self._act(episode, play, task, reply.message.text, calls)
            if calls and (ended := after_calls(episode, reply)) is not None:
                await episode.observe(messages)
                return ended
            if play.done:
                if messages:  # answers to the last calls; no turn follows
                    await episode.observe(messages)
                return Status.COMPLETED
            if episode.assistant_turns >= limits.max_assistant_turns:
                return Status.TURN_LIMIT
            if not await observe(messages):
                return Status.LENGTH

    async def _play_roles(
        self, episode: Episode, play: Play, task: Task, opening: str | None
    ) -> tuple[Status, dict[str, float]]:
        """Let the roles move in the environment's order: (how the episode ended, its score and further numbers)."""
        branches: dict[str, Episode] = {}
        try:
            status = await self._move(episode, play, task, opening, branches)
        finally:
            for branch in branches.values():
                await episode.context.engine.release(branch.session)
        scores, numbers = await play.role_scores()
        if scores is None:
            return status, numbers
        try:
            return status, {**numbers, "score": add_role_scores(episode.trajectory, scores)}
        except ValueError as error:
            raise play.error(f"scores: {error}") from error

    async def _move(
        self, episode: Episode, play: Play, task: Task, said: str | None, branches: dict[str, Episode]
    ) -> Status:
        """Take turns until the episode ends. Each role has a branch, which is added to `branches`.

        said: the first observation.
        """
        answers: dict[str, list[Message]] = {}
        """By role, answers to the calls of its last turn, which it is shown with its next observation."""
        while True:
            role = play.next_role(task.roles)
            if role not in branches:
                branch = branches[role] = episode.branch(role)
                await branch.start(
                    episode.sample.prompt if said is None else with_opening(episode.sample.prompt, said), task.tools
                )
                room = branch.budget_left > 0
            else:
                branch = branches[role]
                shown = answers.pop(role, []) + ([] if said is None else [Message(role="user", content=said)])
                if not shown:
                    raise play.error(f"the role {role} has no observation to answer")
                room = await branch.observe(shown)
            if not room:
                if not play.steps:
                    raise _no_room(play)
                return Status.LENGTH
            branch.state = said
            reply = await episode.context.roles[role](branch, (), None)
            if (ended := after_turn(branch, reply)) is not None:
                return ended
            calls, turn = reply.message.calls, episode.trajectory.turns[-1]
            messages = await self._act(branch, play, task, reply.message.text, calls)
            if turn.role == FROZEN:
                turn.reward = None  # it is no token's
            answers[role] = [message for message in messages if message["role"] == "tool"]
            said = next((str(message["content"]) for message in messages if message["role"] == "user"), None)
            ended = after_calls(branch, reply) if calls else None
            if (
                ended is None
                and not play.done
                and sum(one.assistant_turns for one in branches.values())
                >= (episode.context.limits.max_assistant_turns)
            ):
                ended = Status.TURN_LIMIT
            if ended is not None or play.done:
                if answers[role]:
                    await branch.observe(answers[role])
                return ended or Status.COMPLETED

    async def _act(
        self, episode: Episode, play: Play, task: Task, text: str, calls: Sequence[ParsedCall]
    ) -> list[Message]:
        """Make one step of the policy's turn, and record its calls and reward; return what answers it."""
        limit, shown = episode.context.limits.max_parallel_calls, episode.context.tools.shown
        answers = [
            refusal(call.name, call.arguments, call.error, task.checks) if at < limit else over_limit(limit)
            for at, call in enumerate(calls)
        ]
        sent = [at for at, answer in enumerate(answers) if answer is None]
        answers = [None if answer is None else await shown(answer) for answer in answers]
        found: Fields = {}
        turn = episode.trajectory.turns[-1]
        if sent or not calls:
            begun = time.monotonic()
            episode.waiting_for = f"environment {play.sidecar.name}"
            wire: list[Fields] = [
                {"id": calls[at].id, "name": calls[at].name, "arguments": calls[at].arguments} for at in sent
            ]
            found = await play.step(text, wire)
            seconds = time.monotonic() - begun
            episode.tool_seconds += seconds
            for at, said in zip(sent, as_list(found["answers"]), strict=True):
                answers[at] = replace(await self._cut(episode, play, str(said)), seconds=seconds)
            if isinstance(reward := found["reward"], float):
                turn.reward = reward + (turn.reward or 0.0)
            metrics = as_object(found.get("metrics"))
            episode.trajectory.score_extra |= {name: play.number(metrics, name) for name in metrics}
        records = [
            ToolCallRecord(call.name, call.arguments, answer)
            for call, answer in zip(calls, answers, strict=True)
            if answer is not None
        ]
        record_calls(turn, records)
        messages = [answer_to(call, record) for call, record in zip(calls, records, strict=True)]
        observation = found.get("observation")
        if isinstance(observation, str) and not play.done:
            messages.append({"role": "user", "content": (await self._cut(episode, play, observation)).text})
            episode.state = observation
        return messages

    def _task(self, sample: Sample) -> Task:
        """Read the row's task. Raises DataError."""
        text: JSON = sample.extra_info.get(COLUMN)
        try:
            if not isinstance(text, str):
                raise ValueError(f"expected a task as JSON text, found {text!r:.80}")
            task = read_task(text)
            if task.entry not in (None, sample.agent_name):
                raise ValueError(f"the row was made for {task.entry!r:.80}, and not for {sample.agent_name}")
        except ValueError as error:
            raise self._refusal(sample, str(error)) from error
        return task

    def _refusal(self, sample: Sample, problem: str) -> DataError:
        again = f"python -m data_prep.environment --config {self._file} --name {sample.agent_name} --out DIR"
        return DataError(f"{sample.place}: extra_info.{COLUMN}: {problem}. Make the rows again: {again}")

    async def _cut(self, episode: Episode, play: Play, text: str) -> ToolAnswer:
        """Cut an observation as answers of tools are cut, and warn of it."""
        tools = episode.context.tools
        answer = await tools.shown(ToolAnswer(text))
        if answer.truncated:
            warnings.warn(
                f"environment {play.sidecar.name}",
                f"the observation of step {play.steps} of {play.place} is cut to {tools.default_max_tokens} tokens "
                "(actor_rollout_ref.rollout.multi_turn.max_tool_response_length)",
            )
        return answer


def _no_room(play: Play) -> NoScore:
    return NoScore(f"{play.place}: prompt and first observation leave no room for a turn (data.max_response_length)")
