"""Environment in the style of Gymnasium as the other side of a dialogue: its observations are the user's turns."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import pydantic

from agentrl.errors import ConfigError, install_extra
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.system.entries import load_object
from agentrl.system.numbers import finite
from agentrl.system.threads import AbandonedThreads, DaemonThreads, OwnThread
from agentrl.system.user_code import contract_error
from agentrl.trajectory import Message

P = ParamSpec("P")
T = TypeVar("T")

MAX_HANGING = 64
"""Number of given-up threads still running from which on no new environment is begun."""


class Environment(Protocol):
    """Methods that every environment has; `close` and `action_space` are optional."""

    def reset(self, *, seed: int | None, options: dict[str, Any] | None) -> object: ...

    def step(self, action: object) -> object: ...


class EnvironmentOptions(pydantic.BaseModel):
    """Config of the interaction."""

    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)

    factory: str | None = None
    """`package.module.name` or `path/to/file.py:name` of a class or function that makes an environment. Either this or
    `gymnasium_id`."""
    gymnasium_id: str | None = None
    """Id of an environment that `gymnasium.make` makes."""
    kwargs: dict[str, Any] = {}
    """Arguments of the factory."""
    max_steps: int | None = pydantic.Field(None, gt=0)
    """Steps after which the dialogue ends, however the environment goes on."""
    actions: list[str] | None = None
    """Names of a discrete space's actions, from the first; the policy may say these or the numbers."""
    parse: str | None = None
    """Name, likewise, of a function of (text, environment) that makes an action of an answer. The text of a ValueError
    that it raises is told to the policy, and nothing is stepped."""
    render: str | None = None
    """Name, likewise, of a function of (observation, environment) that makes a text of an observation."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> EnvironmentOptions:
        if (self.factory is None) == (self.gymnasium_id is None):
            raise ValueError("set either `factory` or `gymnasium_id`")
        if self.parse is not None and self.actions is not None:
            raise ValueError("`actions` has no effect where `parse` is set")
        return self


class EnvironmentRow(pydantic.BaseModel):
    """A row's `interaction_kwargs`, beside `name`: the arguments of `reset`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    seed: int | None = None
    options: dict[str, Any] | None = None


@dataclass(slots=True)
class _Play:
    """One trajectory's environment. Only its thread touches it."""

    thread: OwnThread
    environment: Environment | None = None
    observation: str = ""
    """Last observation, as text."""
    steps: int = 0
    total: float = 0.0
    last: asyncio.Future[Any] | None = None

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.last = future = self.thread.submit(function, *args, **kwargs)
        return await future

    @property
    def hangs(self) -> bool:
        """True when its last call was given up: the thread may still be in it."""
        return self.last is not None and self.last.cancelled()


class EnvironmentInteraction(Interaction):
    """Interaction with an object that has `reset(seed=, options=)`, `step(action)` and perhaps `close()`.

    `reset` returns (observation, info), `step` (observation, reward, terminated, truncated, info). Each trajectory has
    an environment of its own, made, stepped and closed in a thread of its own: environments block, keep state, and are
    often bound to the thread that made them. The first observation opens the dialogue, a step's reward is that turn's
    score, and their sum the dialogue's. A step that hangs is given up at the call's deadline; its environment is closed
    when it comes back.

    Row: `interaction_kwargs: {name: ..., seed: 7, options: {...}}`.
    """

    config_model = EnvironmentOptions
    row_model = EnvironmentRow
    options: EnvironmentOptions

    def __init__(self, config: dict[str, Any], name: str) -> None:
        """Import what the config names. Raises ConfigError for a name that cannot be imported."""
        super().__init__(config, name)
        options = self.options
        self._make = _factory(options)
        self._parse = load_object(options.parse, "parse") if options.parse else self._read
        self._render = load_object(options.render, "render") if options.render else lambda shown, _: str(shown)
        self._plays: dict[str, _Play] = {}
        self._hanging: list[OwnThread] = []

    async def start(self, run: str) -> None:
        """Make one environment and close it. Raises ConfigError when that fails or its actions cannot be read."""
        await DaemonThreads(f"interaction {self.name}").run(self._try_out)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Make and reset the trajectory's environment.

        Raises DataError for a row that `reset` cannot be given, AbandonedThreads when too many environments hang, and
        what factory and `reset` raise.
        """
        self.check_row(kwargs)
        row = EnvironmentRow.model_validate(kwargs)
        self._hanging = [thread for thread in self._hanging if thread.is_alive]
        if len(self._hanging) >= MAX_HANGING:
            raise AbandonedThreads(f"{len(self._hanging)} environments of interaction {self.name} hang")
        play = self._plays[instance_id] = _Play(OwnThread(f"interaction {self.name}"))
        try:
            await play.run(self._begin, play, row)
        except BaseException:
            await self.finalize_interaction(instance_id)
            raise

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str:
        return self._plays[instance_id].observation

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        play = self._plays[instance_id]
        return await play.run(self._step, play, str(messages[-1].get("content") or ""))

    async def calculate_score(self, instance_id: str) -> float:
        return self._plays[instance_id].total

    async def finalize_interaction(self, instance_id: str) -> None:
        """Close the environment, behind whatever its thread still does; waits for that unless it hangs."""
        play = self._plays.pop(instance_id)
        hangs, closed = play.hangs, play.thread.submit(_close, play)
        play.thread.end()
        try:
            if not hangs:
                await closed
        finally:
            if not closed.done() or closed.cancelled():
                self._hanging.append(play.thread)

    def _try_out(self) -> None:
        try:
            environment = self._make()
        except Exception as error:
            raise ConfigError(
                f"interaction {self.name}: the environment cannot be made: {type(error).__name__}: {error}"
            ) from error
        space, names = getattr(environment, "action_space", None), self.options.actions
        numbers = _numbers(space)
        _close_environment(environment)
        if self.options.parse is not None:
            return
        if names is not None and len(names) != len(numbers or ()):
            raise ConfigError(f"interaction {self.name}: `actions` names {len(names)}, the environment has {space}")
        if numbers is None and space is not None and type(space).__name__ != "Text":
            raise ConfigError(
                f"interaction {self.name}: actions of {space} cannot be read from text: set `parse` to "
                "`package.module.function(text, environment)`"
            )

    def _begin(self, play: _Play, row: EnvironmentRow) -> None:
        environment = play.environment = self._make()
        reset = environment.reset
        observation, _ = self._parts(reset, reset(seed=row.seed, options=row.options), "(observation, info)")
        play.observation = self._rendered(observation, play)

    def _step(self, play: _Play, text: str) -> InteractionResponse:
        assert play.environment is not None
        try:
            action = self._parse(text, play.environment)
        except ValueError as error:
            text = f"This is not a valid action: {error}"
            return InteractionResponse(should_end=False, text=text, state=play.observation)  # which has not changed
        step = play.environment.step
        expected = "(observation, reward, terminated, truncated, info)"
        observation, reward, terminated, truncated, _ = self._parts(step, step(action), expected)
        if finite(reward) is None:
            raise contract_error(
                f"interaction {self.name}", step, f"its reward must be a finite number, found {reward!r:.100}"
            )
        play.steps += 1
        play.total += float(reward)
        play.observation = self._rendered(observation, play)
        return InteractionResponse(
            should_end=bool(terminated or truncated or play.steps == self.options.max_steps),
            text=play.observation,
            score=float(reward),
            state=play.observation,
            extra={"environment_steps": play.steps, "environment_terminated": bool(terminated)},
        )

    def _parts(self, method: Callable[..., object], answer: object, expected: str) -> Sequence[Any]:
        """Check the number of parts of an answer. Raises CodeError."""
        if not isinstance(answer, (tuple, list)) or len(answer) != expected.count(",") + 1:
            raise contract_error(
                f"interaction {self.name}", method, f"it must return {expected}, found {answer!r:.100}"
            )
        return answer

    def _rendered(self, observation: object, play: _Play) -> str:
        """Render an observation as text. Raises CodeError when the result is no text."""
        text = self._render(observation, play.environment)
        if not isinstance(text, str):
            raise contract_error(
                f"interaction {self.name}", self._render, f"`render` must return a text, found {text!r:.100}"
            )
        return text

    def _read(self, text: str, environment: Environment) -> str | int:
        """Read the action that the last line names last, of a discrete space; of any other space return the whole text.

        Raises ValueError, whose text is told to the policy.
        """
        numbers = _numbers(getattr(environment, "action_space", None))
        if numbers is None:
            return text
        names = self.options.actions or []
        action = _last_action(text, dict(zip((name.lower() for name in names), numbers, strict=False)))
        if action is None or action not in numbers:
            wanted = ", ".join(names) or f"a number from {numbers[0]} to {numbers[-1]}"
            what = "the last line names none" if action is None else f"{action} is none"
            raise ValueError(f"{what}. End your answer with {'one of ' if names else ''}{wanted}")
        return action


def _last_action(text: str, by_name: dict[str, int]) -> int | None:
    """Find the last number or name of an action in the last line that is not empty."""
    last_line = next((line for line in reversed(text.lower().splitlines()) if line.strip()), "")
    words = [r"-?\d+", *(re.escape(name) for name in sorted(by_name, key=len, reverse=True))]
    found: list[str] = re.findall(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", last_line)
    if not found:
        return None
    return by_name[found[-1]] if found[-1] in by_name else int(found[-1])


def _factory(options: EnvironmentOptions) -> Callable[[], Environment]:
    """Return the function that makes an environment. Raises ConfigError."""
    if options.gymnasium_id is None:
        return partial(load_object(options.factory or "", "factory"), **options.kwargs)
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"`gymnasium_id` needs gymnasium: {install_extra('gymnasium')}") from error
    return partial(gymnasium.make, options.gymnasium_id, **options.kwargs)


def _numbers(space: object) -> range | None:
    """Return the actions of a discrete space; None for any other."""
    if not (hasattr(space, "n") and hasattr(space, "start")):
        return None
    return range(int(space.start), int(space.start) + int(space.n))


def _close(play: _Play) -> None:
    if play.environment is not None:
        _close_environment(play.environment)


def _close_environment(environment: Environment) -> None:
    if hasattr(environment, "close"):
        environment.close()
