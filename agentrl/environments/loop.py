"""Loop that plays episodes of a sidecar: its tools, its observations as turns, its rewards, its end."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.dialogue import with_opening
from agentrl.agent_loop.stopping import after_calls, after_turn
from agentrl.agent_loop.tool_calls import answer_to, record_calls, record_of
from agentrl.chat import ParsedCall
from agentrl.environments.sidecar import EnvironmentOptions, Fields, Play, Sidecar
from agentrl.errors import ConfigError, DataError
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.system.plugin import nearest
from agentrl.system.throttle import ThrottledWarnings
from agentrl.tool import ErrorKind, ToolSchema
from agentrl.tool.arguments import ArgumentCheck
from agentrl.tool.session import ToolResult
from agentrl.trajectory import Message, Status
from agentrl.trajectory.sample import Sample

warnings = ThrottledWarnings(logging.getLogger(__name__))

COLUMN = "environment"
"""Key of `extra_info` that holds a row's task, as JSON text."""


@dataclass(frozen=True, slots=True)
class Task:
    """A row's task, as the environment listed it."""

    fields: Fields
    seed: int
    tools: list[ToolSchema]
    checks: dict[str, ArgumentCheck]
    """Checks of the arguments, by tool."""

    @property
    def name(self) -> str:
        """Name of the task in messages."""
        return str(self.fields.get("id", "without id"))


@functools.lru_cache(maxsize=4096)
def read_task(text: str) -> Task:
    """Read the JSON of a row's task. Raises ValueError."""
    try:
        found = as_object(json.loads(text))
        fields, seed = found["task"], found["seed"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"expected JSON with `task` and `seed`, found {text[:80]!r} ({error!r})") from error
    if not isinstance(fields, dict) or not isinstance(seed, int):
        raise ValueError(f"expected an object as `task` and an integer as `seed`, found {text[:80]!r}")
    return Task(fields, seed, *tools_of(fields))


def tools_of(task: Fields) -> tuple[list[ToolSchema], dict[str, ArgumentCheck]]:
    """Return the schemas of a task's tools, and the check of each one's arguments. Raises ValueError."""
    schemas: list[ToolSchema] = as_list(task.get("tools"))  # type: ignore[assignment]  # checked by ArgumentCheck
    try:
        checks = [ArgumentCheck(schema) for schema in schemas]
    except ConfigError as error:
        raise ValueError(f"tools: {error}") from error
    return schemas, {schema["function"]["name"]: check for schema, check in zip(schemas, checks, strict=True)}


class EnvironmentLoop(AgentLoop):
    """Loop of an environment's entry. The environment runs in a process of its own.

    After a kill the episode is played again with the recorded turns: an environment that answers otherwise than before
    makes the trajectory restart.
    """

    takes_images = False

    def __init__(self, options: EnvironmentOptions) -> None:
        self._sidecar = Sidecar(options)

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        """Return the row's prompt and the tools of its task. Raises DataError."""
        return sample.prompt, _task(sample).tools

    def check(self) -> None:
        """Start the sidecar. Raises ConfigError with its last lines when that fails."""
        self._sidecar.start()

    async def close(self) -> None:
        await self._sidecar.close()

    async def run(self, episode: Episode) -> None:
        sample = episode.sample
        task, sidecar = _task(sample), self._sidecar
        episode.waiting_for = f"environment {sidecar.name}"
        address = await sidecar.ready()
        place = f"task {task.name} ({sample.place})"
        play = Play(sidecar, address, episode.context.limits.call_timeout, place)
        try:
            opening = await play.start(task.fields, task.seed)
            prompt = sample.prompt if opening is None else with_opening(sample.prompt, opening)
            episode.state = opening
            await episode.start(prompt, task.tools)
            status = await self._converse(episode, play, task)
            numbers = await play.score()
        finally:
            closing = asyncio.ensure_future(play.close())
            await asyncio.shield(closing)
        extra = episode.trajectory.score_extra
        extra["interaction_score"] = numbers.pop("score")
        extra["interaction_turn_score"] = sum(turn.reward or 0.0 for turn in episode.trajectory.turns)
        extra |= numbers
        episode.finish(status)

    async def _converse(self, episode: Episode, play: Play, task: Task) -> Status:
        limits = episode.context.limits
        if episode.budget_left <= 0:
            return Status.LENGTH
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
            if not await episode.observe(messages):
                return Status.LENGTH

    async def _act(
        self, episode: Episode, play: Play, task: Task, text: str, calls: Sequence[ParsedCall]
    ) -> list[Message]:
        """Make one step of the policy's turn, and record its calls and reward; return what answers it."""
        results = [_refused(call, task) for call in calls]
        limit = episode.context.limits.max_parallel_calls
        results[limit:] = [_error(ErrorKind.LIMIT, f"only the first {limit} calls of a message are run")] * (
            len(calls) - limit
        )
        sent = [at for at, result in enumerate(results) if result is None]
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
            for at, answer in zip(sent, as_list(found["answers"]), strict=True):
                cut, truncated = self._cut(episode, play, str(answer))
                results[at] = ToolResult(cut, seconds=seconds, truncated=truncated)
            if isinstance(reward := found["reward"], float):
                turn.reward = reward + (turn.reward or 0.0)
            metrics = as_object(found.get("metrics"))
            episode.trajectory.score_extra |= {name: play.number(metrics, name) for name in metrics}
        answered = [(call, result) for call, result in zip(calls, results, strict=True) if result is not None]
        record_calls(turn, [record_of(call, result) for call, result in answered])
        messages = [answer_to(call, result) for call, result in answered]
        observation = found.get("observation")
        if isinstance(observation, str) and not play.done:
            messages.append({"role": "user", "content": self._cut(episode, play, observation)[0]})
            episode.state = observation
        return messages

    def _cut(self, episode: Episode, play: Play, text: str) -> tuple[str, bool]:
        """Cut an observation as answers of tools are cut, and warn of it."""
        tools = episode.context.tools
        cut, truncated = tools.truncation.text(text, tools.default_max_tokens)
        if truncated:
            warnings.warn(
                f"environment {play.sidecar.name}",
                f"the observation of step {play.steps} of {play.place} is cut to {tools.default_max_tokens} tokens "
                "(actor_rollout_ref.rollout.multi_turn.max_tool_response_length)",
            )
        return cut, truncated


def _task(sample: Sample) -> Task:
    text: JSON = sample.extra_info.get(COLUMN)
    try:
        if not isinstance(text, str):
            raise ValueError(f"expected a task as JSON text, found {text!r:.80}")
        return read_task(text)
    except ValueError as error:
        raise DataError(
            f"{sample.place}: extra_info.{COLUMN}: {error}; python -m data_prep.environment makes such rows"
        ) from error


def _refused(call: ParsedCall, task: Task) -> ToolResult | None:
    """Return the answer to a call that no environment is asked about; None for a well-formed one."""
    if call.error is not None or call.arguments is None:
        return _error(ErrorKind.PARSE, call.error or "the call has no arguments")
    if (check := task.checks.get(call.name)) is None:
        known = list(task.checks)
        shown = call.name[:64]
        return _error(
            ErrorKind.UNKNOWN_TOOL, f"no tool {shown!r}{nearest(shown, known)}; available: {', '.join(known) or 'none'}"
        )
    problem = check(call.arguments)
    return None if problem is None else _error(ErrorKind.ARGUMENTS, problem)


def _error(kind: ErrorKind, problem: str) -> ToolResult:
    return ToolResult(f"Error ({kind.value}): {problem}", kind)
