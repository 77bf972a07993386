"""Tools in TRL's form, and the loop that calls them as TRL's `GRPOTrainer` does."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.agent_loop.stopping import after_turn
from agentrl.chat import ParsedCall
from agentrl.errors import ConfigError
from agentrl.system.threads import beside_loop
from agentrl.system.throttle import ThrottledWarnings
from agentrl.system.user_code import code_error
from agentrl.tool import FunctionTool, Tool
from agentrl.trajectory import Message, Status
from agentrl.trajectory.picture import size_of

warnings = ThrottledWarnings(logging.getLogger(__name__))
LOOP = "trl_tools"
"""Name of the loop in rows."""


class TrlToolLoop(AgentLoop):
    """Loop of assistant turns with tool calls, in TRL's words for limits and errors.

    A turn without a call that can be read ends the trajectory, and so does a turn after the last round of calls, whose
    own calls are not run. Answers that do not fit the budget end it, too, and are left out.
    """

    def __init__(self, max_rounds: int | None) -> None:
        """`max_rounds`: TRL's max_tool_calling_iterations; None: no limit."""
        self.max_rounds = max_rounds

    async def run(self, episode: Episode) -> None:
        await episode.open_tools()
        await episode.start(*self.first_prompt(episode.sample, episode.context.tools.schemas))
        episode.finish(await self._converse(episode))

    async def _converse(self, episode: Episode) -> Status:
        rounds = 0
        if episode.budget_left <= 0:
            return Status.LENGTH
        while True:
            reply = await episode.generate()
            if (ended := after_turn(episode, reply)) is not None:
                return ended
            calls = reply.message.calls
            if not calls or rounds == self.max_rounds or any(call.error is not None for call in calls):
                return Status.COMPLETED
            rounds += 1
            messages = await self._answers(episode, calls)
            ids = await beside_loop(
                size_of(messages),
                partial(
                    episode.context.chat.bridge,
                    episode.transcript.ids,
                    messages,
                    episode.tools,
                    first=len(episode.messages),
                ),
            )
            if len(ids) > episode.budget_left or not episode.observe_ids(ids, messages):
                return Status.LENGTH

    async def _answers(self, episode: Episode, calls: Sequence[ParsedCall]) -> list[Message]:
        """Run the calls of a turn; return the messages that answer them."""
        return (await episode.answer_calls(calls))[1]


def as_tools(functions: Sequence[object], most_tokens: int) -> list[Tool]:
    """Make tools whose answers are TRL's texts: str() of the result, and {'error': message} of an exception.

    most_tokens: bound of an answer, which TRL does not cut before the budget ends. Raises ConfigError.
    """
    return [
        function if isinstance(function, Tool) else as_tool(f"tools[{number}]", function, most_tokens)
        for number, function in enumerate(functions)
    ]


def as_tool(where: str, function: object, most_tokens: int) -> FunctionTool:
    """Make a tool of one function, whose place in the trainer's arguments is `where`. Raises ConfigError."""
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{where}: expected a function with type hints and a docstring, found {function!r:.100}")
    try:
        return FunctionTool(answering(function), {"max_response_tokens": most_tokens})
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def answering(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function, sync or async, so that it answers as TRL does; signature and docstring stay."""
    if inspect.iscoroutinefunction(function):
        coroutine = cast("Callable[..., Awaitable[object]]", function)

        @functools.wraps(function)
        async def call_async(*args: object, **kwargs: object) -> str:
            try:
                return str(await coroutine(*args, **kwargs))
            except Exception as error:
                return _answer_to(error, function)

        return call_async

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> str:
        try:
            return str(function(*args, **kwargs))
        except Exception as error:
            return _answer_to(error, function)

    return call


def _answer_to(error: Exception, function: Callable[..., object]) -> str:
    """Answer an exception of a tool as TRL does, and show the user where it was raised, more and more seldom."""
    place = code_error("tool", error, function).place
    at = f" ({place})" if place else ""
    warnings.warn(
        f"tool {function.__name__}", f"{type(error).__name__}: {error}{at}; the policy reads it as the answer"
    )
    return str({"error": str(error)})
