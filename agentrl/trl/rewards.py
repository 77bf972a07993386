"""Reward functions in TRL's form: lists in, lists out, one call for the trajectories of a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.errors import ConfigError
from agentrl.reward import GroupRewardManager, Verdict
from agentrl.system.numbers import finite
from agentrl.system.threads import DaemonThreads
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory import Trajectory
from agentrl.trajectory.sample import Sample
from agentrl.trl.completions import completion_ids_of, completion_of
from agentrl.trl.environments import HELD, Environments
from agentrl.trl.names import REWARD, UNSCORED

if TYPE_CHECKING:
    from transformers import TrainerState

RewardFunction = Callable[..., object]
Row = Mapping[str, object]
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that reward functions are not given under their own names."""
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that every reward function is called with, next to the columns."""


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A reward function with its name in metrics."""

    name: str
    call: RewardFunction
    weight: float
    is_async: bool
    threads: DaemonThreads


@dataclass(slots=True)
class Logged:
    """Numbers that a reward function logs in one call, of `count` trajectories."""

    count: int
    numbers: list[dict[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = [{} for _ in range(self.count)]

    def metric(self, name: str, value: float) -> None:
        """Log a number of the whole call (`log_metric`)."""
        for one in self.numbers:
            one[name] = float(value)

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Log a column (`log_extra`): its numbers are kept, text is not."""
        for one, value in zip(self.numbers, values, strict=True):
            if (number := finite(value)) is not None:
                one[column] = number


def named_functions(
    functions: object, weights: Sequence[float] | None, of_environments: Mapping[str, RewardFunction]
) -> list[NamedFunction]:
    """Name and check the reward functions of a trainer.

    of_environments: the rewards that environments give themselves, by name, each with weight 1. Raises ConfigError.
    """
    given = functions if isinstance(functions, list | tuple) else [] if functions is None else [functions]
    if not given and not of_environments:
        raise ConfigError(
            "GRPOTrainer: reward_funcs is empty: give a function, a list of functions, or environments with a method "
            "get_reward"
        )
    if weights is not None and (not isinstance(weights, list | tuple) or None in map(finite, weights)):
        raise ConfigError(f"GRPOConfig: reward_weights={weights!r}: expected a list of numbers, one for each function")
    if weights is not None and len(weights) != len(given):
        raise ConfigError(
            f"GRPOConfig: reward_weights has {len(weights)} entries for {len(given)} reward_funcs: give one for each"
        )
    found: list[NamedFunction] = []
    for number, function in enumerate([*given, *of_environments.values()]):
        where = f"reward_funcs[{number}]"
        if isinstance(function, str):
            raise ConfigError(
                f"{where}={function!r}: a model's name; a reward model is a key of agentrl: "
                "overrides={'reward_model.enable': True, 'reward_model.model.path': ...} (docs/rewards.md)"
            )
        if not callable(function) or hasattr(function, "parameters"):
            raise ConfigError(f"{where}: expected a function of completions, found {type(function).__name__}")
        name = getattr(function, "__name__", type(function).__name__)
        if any(one.name == name for one in found):
            raise ConfigError(
                f"{where}: two functions are called {name!r}, by which their rewards are logged: rename one"
            )
        _check_signature(function, where, name)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(type(function), "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )
        weight = 1.0 if weights is None or number >= len(given) else float(weights[number])
        found.append(NamedFunction(name, function, weight, is_async, DaemonThreads(f"reward {name}")))
    return found


def _check_signature(function: RewardFunction, where: str, name: str) -> None:
    """Raise ConfigError for a function that cannot be called by TRL's keywords."""
    parameters = inspect.signature(function).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]
    if not any(one.kind is one.VAR_KEYWORD for one in parameters) or positional:
        taken = ", ".join(one.name for one in parameters)
        raise ConfigError(
            f"{where}, {name}({taken}): it is called with {', '.join(GIVEN)} and the data set's columns as "
            f"keywords: write it as `def {name}(completions, **kwargs)`"
        )


class TrlRewards(GroupRewardManager):
    """Weighted sum of reward functions in TRL's form.

    The functions are called with the trajectories of one prompt at a time, where TRL calls them with a batch.
    """

    def __init__(
        self,
        functions: Sequence[NamedFunction],
        rows: Mapping[str, Sequence[Row]],
        state: TrainerState,
        *,
        environments: Environments | None = None,
        with_tools: bool = False,
        with_columns: bool = True,
    ) -> None:
        """Args:
        rows: the rows of each data file, with the columns that functions are given.
        state: the trainer's.
        environments: the ones that played the trajectories.
        with_tools: completions have calls as fields; without tools they are the text as it was sampled.
        """
        super().__init__(RewardConfig(), CustomRewardConfig(), beside_model=False)
        self._functions, self._rows, self._state, self._with_columns = functions, rows, state, with_columns
        self._environments, self._with_tools = environments, with_tools
        self._tokenizer: Any = None

    def bind(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def is_tried(self, data_source: str) -> bool:
        """Functions that log or count are called with trajectories of the run alone."""
        return False

    async def score_group(self, trajectories: Sequence[Trajectory], sample: Sample) -> Sequence[Verdict]:
        """Score trajectories by every function. Raises CodeError for a function that breaks TRL's contract."""
        count, row = len(trajectories), self._rows[sample.file][sample.row]
        logged = Logged(count)
        prompt = cast(Sequence[object], row.get("prompt", sample.prompt))
        arguments: dict[str, object] = {
            "prompts": [prompt] * count,
            "completions": [
                completion_of(one, len(prompt), self._tokenizer, with_tools=self._with_tools) for one in trajectories
            ],
            "completion_ids": [completion_ids_of(one) for one in trajectories],
            "trainer_state": self._state,
            "log_extra": logged.extra,
            "log_metric": logged.metric,
        }
        if self._with_columns:
            arguments |= {name: [value] * count for name, value in row.items() if name not in NOT_COLUMNS}
        if self._environments is not None:  # which may have added to the prompt
            arguments["prompts"] = [one.messages[: len(prompt)] for one in trajectories]
            arguments["environments"] = [one.for_scorers[HELD] for one in trajectories]
        rewards = {one.name: await self._call(one, arguments, count) for one in self._functions}
        if self._environments is not None:
            for one in trajectories:
                self._environments.close(one)
        return [self._verdict(number, rewards, logged.numbers[number]) for number in range(count)]

    def _verdict(self, number: int, rewards: Mapping[str, list[float | None]], logged: Mapping[str, float]) -> Verdict:
        score, extra, scored = 0.0, dict(logged), False
        for one in self._functions:
            reward = rewards[one.name][number]
            if reward is not None:
                score, scored = score + one.weight * reward, True
                extra[REWARD + one.name] = reward
        if not scored:
            extra[UNSCORED] = 1.0
        return Verdict(score, extra)

    async def _call(self, one: NamedFunction, arguments: Mapping[str, object], count: int) -> list[float | None]:
        where = f"reward function {one.name}"
        with user_code(where, one.call):
            if one.is_async:
                answer = one.call(**arguments)
                found: object = await answer if inspect.isawaitable(answer) else answer
            else:
                found = await one.threads.run(one.call, **arguments)
        if hasattr(found, "tolist"):
            found = cast(Any, found).tolist()
        if not isinstance(found, list | tuple) or len(found) != count:
            what = f"{len(found)} rewards" if isinstance(found, list | tuple) else f"{found!r:.100}"
            raise contract_error(
                where, one.call, f"it must return a list of {count} rewards, one for each completion; found {what}"
            )
        return [_reward(where, one.call, value) for value in found]


def _reward(where: str, function: RewardFunction, value: object) -> float | None:
    """Read a reward: a number, or None where the function is not applicable. Raises CodeError."""
    if value is None or value != value:  # NaN stands for None, as in TRL
        return None
    number = finite(value)
    if number is None:
        raise contract_error(where, function, f"a reward must be a finite number or None, found {value!r:.100}")
    return number
