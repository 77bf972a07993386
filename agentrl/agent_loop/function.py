"""A loop that is a coroutine function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.agent_loop.registry import make_loop
from agentrl.errors import ConfigError

LoopFunction = Callable[[Episode], Awaitable[None]]


class FunctionLoop(AgentLoop):
    """Run `function(episode)`, which does what `AgentLoop.run` is asked for."""

    def __init__(self, function: LoopFunction) -> None:
        self.function = function

    @property
    def code(self) -> LoopFunction:
        return self.function

    async def run(self, episode: Episode) -> None:
        await self.function(episode)


def as_loop(name: str, given: AgentLoop | type[AgentLoop] | LoopFunction) -> AgentLoop:
    """Make the loop called `name` of an object, a class without arguments, or a coroutine function of an episode.

    Raises ConfigError for anything else, and for a class that cannot be made.
    """
    if isinstance(given, AgentLoop):
        return given
    if isinstance(given, type) and issubclass(given, AgentLoop):
        return make_loop(name, given)
    if inspect.iscoroutinefunction(given):
        return FunctionLoop(given)
    raise ConfigError(
        f"agent loop {name!r}: expected a subclass of agentrl.agent_loop.AgentLoop, an object of one, or "
        f"`async def {name}(episode)`; found {given!r:.100}"
    )
