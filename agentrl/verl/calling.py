"""Calls of methods that verl's users wrote, whose signatures differ between verl's versions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar, cast

from pydantic import BaseModel, ConfigDict

from agentrl.system.loop_thread import LoopThread

T = TypeVar("T")

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ConstructorOptions(BaseModel):
    """Further arguments of a user's constructor: a loop's YAML entry, or `reward_model.reward_manager_options`."""

    model_config = ConfigDict(extra="allow")


def fitting(function: Callable[..., object], offered: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of `offered` that the function names as parameters; all of them where it has `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    names = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    return {name: value for name, value in offered.items() if name in names}


async def call(function: Callable[..., object], /, *arguments: object, **offered: object) -> object:
    """Call a function with `arguments` and the entries of `offered` that it takes, and await a coroutine's answer."""
    answer = function(*arguments, **fitting(function, offered))
    return await answer if inspect.isawaitable(answer) else answer


_stand_ins: dict[type, type] = {}


def stand_in(adapter: type[T], wrapped: type) -> type[T]:
    """Make the subclass of `adapter` that replaces `wrapped`, under its name; always the same class."""
    if wrapped not in _stand_ins:
        names = {"wrapped": wrapped, "__module__": wrapped.__module__, "__qualname__": wrapped.__qualname__}
        _stand_ins[wrapped] = type(wrapped.__name__, (adapter,), {**names, "__doc__": wrapped.__doc__})
    return cast(type[T], _stand_ins[wrapped])


def waited(work: Coroutine[object, None, T]) -> T:
    """Run a coroutine in an event loop of its own, for plain functions that are called in threads."""
    return _loop().run(work)


@functools.cache
def _loop() -> LoopThread:
    return LoopThread("what verl's plain functions wait for")
