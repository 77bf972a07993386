"""Environments in TRL's form: objects of a factory, whose methods are a trajectory's tools.

An environment plays one trajectory at a time. When the trajectory is scored, it returns to the pool of its name, and
`reset` prepares it for another one. An environment with a method that passed its deadline is dropped instead: the
method goes on in its thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from agentrl.agent_loop.base import CURRENT_EPISODE, Episode
from agentrl.chat import ParsedCall
from agentrl.errors import ConfigError, DataError
from agentrl.system.threads import DaemonThreads
from agentrl.system.user_code import contract_error, user_code
from agentrl.tool import ErrorKind, FunctionTool, Tool, ToolError, ToolResponse, ToolSchema
from agentrl.tool.schema import Schema
from agentrl.trajectory import Message, Trajectory
from agentrl.trajectory.sample import Sample
from agentrl.trl.tools import TrlToolLoop, answering, as_tool

Row = Mapping[str, object]
Factory = Callable[[], object]
HELD = "environment"
"""Entry of a trajectory's `for_scorers` that holds its environment."""
NAME = "environment_name"
"""Entry that holds the environment's name."""
GIVEN_UP = "environment_given_up"
"""Entry that is there when a method of the environment was given up."""
COLUMN = "environment"
"""Column of the rows that names the environment, where a trainer has several."""
OWN = ("reset", "get_reward")
"""Methods of an environment that are no tools."""


class _NotHere(ToolError):
    """Error of a call of another environment's tool."""

    kind = ErrorKind.UNKNOWN_TOOL


class Environments:
    """The environments of a run, by name; the only one of a plain factory has the name ''."""

    def __init__(self, given: object, shared: Sequence[Tool], most_tokens: int) -> None:
        """Make one environment of each name.

        given: TRL's `environment_factory`. shared: tools that are offered with each of them. most_tokens: bound of an
        answer. Raises ConfigError.
        """
        self.by_name = isinstance(given, Mapping)
        factories = given if isinstance(given, Mapping) else {"": given}
        self._factories: dict[str, Factory] = {}
        self._pools: dict[str, list[object]] = {}
        self._threads = DaemonThreads("environment")
        self.types: dict[str, type] = {}
        """By name: the class of its environments."""
        self._schemas: dict[str, list[ToolSchema]] = {}
        methods: dict[str, dict[type, FunctionTool]] = {}
        for name, factory in factories.items():
            where = f"environment_factory[{name!r}]" if self.by_name else "environment_factory"
            if not callable(factory):
                raise ConfigError(f"{where}: expected a class or a function without arguments, found {factory!r:.100}")
            with user_code(where, factory):
                first = factory()
            own = dict(inspect.getmembers(type(first), inspect.isfunction))
            if "reset" not in own:
                raise ConfigError(
                    f"{where}: {type(first).__name__} has no method reset: write `def reset(self, **row)`"
                )
            self._factories[str(name)], self._pools[str(name)] = factory, [first]
            self.types[str(name)] = type(first)
            tools = [
                as_tool(f"{where}: {type(first).__name__}.{method}", getattr(first, method), most_tokens)
                for method in own
                if method not in OWN and not method.startswith("_")
            ]
            self._schemas[str(name)] = [tool.schema for tool in (*shared, *tools)]
            for tool in tools:
                methods.setdefault(tool.name, {})[type(first)] = tool
        self.tools: list[Tool] = [
            *shared,
            *(_MethodTool(found, self._threads, most_tokens) for found in methods.values()),
        ]
        """Tools of all environments, each name once."""

    def schemas(self, row: Row) -> list[ToolSchema]:
        """Return the tools of a row's environment."""
        return self._schemas[self.name_of(row, "the row")]

    def name_of(self, row: Row, place: str) -> str:
        """Return the name of a row's environment. Raises DataError."""
        if not self.by_name:
            return ""
        name = row.get(COLUMN)
        if not isinstance(name, str) or name not in self._factories:
            raise DataError(
                f"{place}: {COLUMN}={name!r}: expected the name of an environment of environment_factory: "
                f"{', '.join(self._factories)}"
            )
        return name

    async def open(self, row: Row, trajectory: Trajectory) -> str | None:
        """Give a trajectory an environment, reset with the row's columns; returns its first observation."""
        name = self.name_of(row, "the row")
        pool = self._pools[name]
        with user_code(f"environment_factory {name}".strip(), self._factories[name]):
            environment: Any = pool.pop() if pool else self._factories[name]()
        trajectory.for_scorers |= {HELD: environment, NAME: name}
        columns = {key: value for key, value in row.items() if not (self.by_name and key == COLUMN)}
        reset: Callable[..., object] = environment.reset
        where = f"{type(environment).__name__}.reset"
        with user_code(where, reset):
            found = await _call(self._threads, reset, **columns)
        if found is not None and not isinstance(found, str):
            raise contract_error(where, reset, f"it must return a text or None, found {found!r:.100}")
        return found

    def close(self, trajectory: Trajectory) -> None:
        """Take a scored trajectory's environment back, unless a method of it may still run."""
        name, environment = cast(str, trajectory.for_scorers.pop(NAME)), trajectory.for_scorers.pop(HELD)
        if not trajectory.for_scorers.pop(GIVEN_UP, False):
            self._pools[name].append(environment)

    def rewards(self) -> dict[str, Callable[..., object]]:
        """Make a reward function of each class with `get_reward`, by the class's name: None for other environments."""
        kinds = {kind.__name__: kind for kind in self.types.values() if hasattr(kind, "get_reward")}
        return {name: self._reward(kind) for name, kind in kinds.items()}

    def _reward(self, kind: type) -> Callable[..., object]:
        async def get_reward(environments: Sequence[Any], **kwargs: object) -> list[object]:
            owned: list[Any] = [one if type(one) is kind else None for one in environments]
            return [None if one is None else await _call(self._threads, one.get_reward) for one in owned]

        get_reward.__name__ = kind.__name__
        return get_reward


class TrlEnvironmentLoop(TrlToolLoop):
    """The same loop, with an environment for each trajectory.

    Calls of a turn run one after another, since they may change the environment.
    """

    on_resume = "none"  # an environment's state is not recorded

    def __init__(self, max_rounds: int | None, environments: Environments, rows: Mapping[str, Sequence[Row]]) -> None:
        """`rows`: the rows of each data file, with all columns."""
        super().__init__(max_rounds)
        self._environments, self._rows = environments, rows

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        return sample.prompt, self._environments.schemas(self._rows[sample.file][sample.row])

    async def run(self, episode: Episode) -> None:
        sample = episode.sample
        row = self._rows[sample.file][sample.row]
        episode.waiting_for = "environment"
        observation = await self._environments.open(row, episode.trajectory)
        await episode.open_tools()
        prompt = with_observation(sample.prompt, observation)
        await episode.start(prompt, self._environments.schemas(row))
        episode.finish(await self._converse(episode))

    async def _answers(self, episode: Episode, calls: Sequence[ParsedCall]) -> list[Message]:
        return [message for call in calls for message in (await episode.answer_calls([call]))[1]]


class _MethodTool(Tool):
    """A method of the environments of one or several classes, called on the trajectory's own environment."""

    def __init__(self, methods: Mapping[type, FunctionTool], threads: DaemonThreads, most_tokens: int) -> None:
        """`methods`: by class, the method as a tool."""
        first, *others = methods.values()
        schema = first.schema
        if any(other.schema != schema for other in others):  # each prompt has its own; `execute` checks by it
            parameters: Schema = {"type": "object", "properties": {}, "additionalProperties": True}
            schema = {"type": "function", "function": {**schema["function"], "parameters": parameters}}
        super().__init__({"max_response_tokens": most_tokens}, schema)
        self._methods, self._threads = methods, threads

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        held = CURRENT_EPISODE.get().trajectory.for_scorers
        environment = held[HELD]
        if type(environment) not in self._methods:
            raise _NotHere(f"no tool {self.name!r} here")
        checked = self._methods[type(environment)].checked(arguments)
        method = answering(getattr(environment, self.name))
        try:
            return ToolResponse(cast(str, await _call(self._threads, method, **checked)))
        except asyncio.CancelledError:
            held[GIVEN_UP] = True
            raise


def with_observation(prompt: Sequence[Message], observation: str | None) -> list[Message]:
    """Append an environment's first observation to the last message."""
    if observation is None:
        return list(prompt)
    last = prompt[-1]
    content = last["content"]
    if isinstance(content, str):
        return [*prompt[:-1], {**last, "content": content + observation}]
    return [*prompt[:-1], {**last, "content": [*(content or ()), {"type": "text", "text": observation}]}]


async def _call(threads: DaemonThreads, function: Callable[..., object], **given: object) -> object:
    """Call a function that may be async; others run in a thread."""
    if inspect.iscoroutinefunction(function):
        return await cast("Awaitable[object]", function(**given))
    return await threads.run(function, **given)
