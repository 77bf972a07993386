"""One scoring function: what it is called with, and what its answer must be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.system.numbers import finite, finite_numbers
from agentrl.system.plugin import nearest
from agentrl.system.registry import options_model, read_options
from agentrl.system.targets import load_file, member
from agentrl.system.threads import DaemonThreads
from agentrl.system.user_code import contract_error, is_agentrl_code, user_code

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info", "trajectory")
"""Arguments that a function may ask for by name in its signature."""
MODEL_ARGUMENTS = ("reward_router_address", "reward_model_tokenizer")
"""Further ones, where there is a generative reward model: its address (host:port) and its tokenizer."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finite score and further finite numbers."""

    score: float
    extra: dict[str, float]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A scoring function that is called with the arguments it asks for."""

    where: str
    """Names it in messages."""
    function: Callable[..., object]
    accepts: frozenset[str]
    """Names among ARGUMENTS and MODEL_ARGUMENTS."""
    kwargs: Mapping[str, object]
    threads: DaemonThreads | None
    """None: it is async, or takes microseconds and runs in the event loop."""
    is_async: bool
    max_concurrent: int | None = None
    """Calls at once; None: as many as reward_model.max_concurrent says."""

    @staticmethod
    def from_function(
        function: Callable[..., object],
        where: str,
        kwargs: Mapping[str, object],
        *,
        key: str = "kwargs",
        in_loop: bool = False,
        max_concurrent: int | None = None,
        asks_model: bool = False,
    ) -> Scorer:
        """`where` names the function in messages, and `key` the config key of `kwargs`.

        With `asks_model` it may ask for MODEL_ARGUMENTS, too. A function with a parameter `options`, annotated with a
        pydantic model, is given kwargs as that. Raises ConfigError when it cannot be called as a scorer.
        """
        if callable(function) and options_model(function) is not None:
            kwargs = {"options": read_options(function, kwargs, key)}
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(type(function), "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )
        threads = None if is_async or in_loop else DaemonThreads(f"scorer {where}")
        names = ARGUMENTS + MODEL_ARGUMENTS if asks_model else ARGUMENTS
        accepts = _accepted(function, where, kwargs, key, names)
        return Scorer(where, function, accepts, dict(kwargs), threads, is_async, max_concurrent)

    async def __call__(self, arguments: Mapping[str, object]) -> Verdict:
        """Raises the function's exceptions, and ValueError for an answer that is no score. For a user's function both
        become a CodeError, except faults.
        """
        given = {name: arguments[name] for name in self.accepts}
        with user_code(self.where, self.function):
            if self.threads is not None:
                answer = await self.threads.run(self.function, **given, **self.kwargs)
            else:
                answer = self.function(**given, **self.kwargs)
            if inspect.isawaitable(answer):
                answer = await answer
        try:
            return as_verdict(answer)
        except ValueError as error:
            if is_agentrl_code(self.function):
                raise
            raise contract_error(self.where, self.function, str(error)) from error

    @property
    def asks_model(self) -> bool:
        """True if it is given the address of the generative reward model."""
        return not self.accepts.isdisjoint(MODEL_ARGUMENTS)

    @property
    def is_instant(self) -> bool:
        """True if it needs no deadline and no place among the running scorers."""
        return self.threads is None and not self.is_async


def no_score(solution_str: str) -> float:
    """Return 0, as the scorer of data that a reward model scores alone."""
    return 0.0


def as_verdict(answer: object) -> Verdict:
    """A number, or a mapping with `score` whose other finite numbers are kept. Raises ValueError for anything else."""
    if not isinstance(answer, Mapping):
        return Verdict(_finite(answer), {})
    if "score" not in answer:
        raise ValueError(f"the scorer's dict has no key 'score', only {sorted(map(str, answer))}")
    extra = finite_numbers("a scorer", {key: value for key, value in answer.items() if key != "score"})
    return Verdict(_finite(answer["score"]), extra)


def _finite(value: object) -> float:
    number = finite(value)
    if number is None:
        raise ValueError(f"a score must be a finite number (in float32), found {value!r}")
    return number


def _accepted(
    function: Callable[..., object], where: str, kwargs: Mapping[str, object], key: str, given: Sequence[str]
) -> frozenset[str]:
    """Which of `given` the function is called with. Raises ConfigError when no call can fit its signature."""
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{where}: expected a function, found {function!r}")
    signature = inspect.signature(function)
    what = f"{where}{signature}"
    parameters = signature.parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for name in kwargs:
        if name in given:
            raise ConfigError(f"{what}: {key} may not set {name!r}, which every scorer is given")
        if name not in names and not any_name:
            raise ConfigError(f"{what}: {key} sets {name!r}{nearest(name, names)}, which is no parameter of it")
    _check_needed(what, parameters, kwargs, key, given)
    if not any_name and "solution_str" not in names and "trajectory" not in names:
        raise ConfigError(f"{what}: it must have the parameter solution_str (or trajectory)")
    # `trajectory` only where it is asked for by name: functions written for other trainers may print their **kwargs.
    return frozenset(name for name in given if name in names or (any_name and name != "trajectory"))


def _check_needed(
    what: str, parameters: Iterable[inspect.Parameter], kwargs: Iterable[str], key: str, given: Sequence[str]
) -> None:
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind in (*_BY_NAME, parameter.POSITIONAL_ONLY)
        if not needed or (parameter.name in (*given, *kwargs) and parameter.kind in _BY_NAME):
            continue
        if parameter.name in MODEL_ARGUMENTS:
            raise ConfigError(
                f"{what}: parameter {parameter.name!r} is that of a function which asks a reward model, and none is "
                "served: a training serves it with reward_model.enable=true reward_model.model.generative=true "
                "reward_model.model.path=MODEL (docs/rewards.md)"
            )
        raise ConfigError(
            f"{what}: parameter {parameter.name!r}{nearest(parameter.name, given)}; a scorer is given, by "
            f"name, {', '.join(given)}, and what {key} sets"
        )


def load_function(path: str, name: str) -> Callable[..., object]:
    """The function `name` of a Python file. Raises ConfigError naming the file and what went wrong."""
    try:
        module = load_file(path)
    except ConfigError as error:
        raise ConfigError(f"custom_reward_function.path: {error}") from error
    found = member(module, name, path, "custom_reward_function.name")
    if not callable(found):
        raise ConfigError(f"custom_reward_function: {path}: {name}: expected a function, found {found!r}")
    return found
