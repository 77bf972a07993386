"""Agents that are Python functions, called in this process."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import Protocol, cast

from agentrl.agents.agent import Agent, AgentOptions
from agentrl.agents.task import API_KEY, MODEL, AgentFailed, AgentTask, read_report
from agentrl.errors import CodeError, ConfigError, UserError
from agentrl.system.proxies import proxy_note
from agentrl.system.targets import load_target
from agentrl.system.threads import DaemonThreads
from agentrl.system.user_code import contract_error, user_code


def build(options: AgentOptions) -> Agent:
    """Load the function that `openai_proxy.target` names. Raises ConfigError."""
    if options.target is None or options.command is not None:
        raise ConfigError("openai_proxy.start=function: set openai_proxy.target, and not openai_proxy.command")
    return FunctionAgent(options.target)


class AgentFunction(Protocol):
    """Function that acts on one sample; see `read_report` for what it may return, also as an awaitable.

    A function with the parameter `report_url` is given the address for scores, too.
    """

    def __call__(self, *, sample: dict[str, object], base_url: str, api_key: str, model: str) -> object: ...


class FunctionAgent(Agent):
    """Python agent `function(sample, base_url, api_key, model)`.

    An async function runs on the event loop, any other in a thread.
    """

    def __init__(self, target: str) -> None:
        """Load `target`: `package.module:function` or `path/to/file.py:function`. Raises ConfigError."""
        self._name = target
        self._function = load_agent(target)
        self._reports = "report_url" in inspect.signature(self._function).parameters
        self._threads = DaemonThreads(f"agent {target}", max_abandoned=1024)

    async def run(self, task: AgentTask) -> dict[str, float]:
        call = partial(self._function, sample=task.sample, base_url=task.base_url, api_key=API_KEY, model=MODEL)
        if self._reports:
            call = partial(call, report_url=task.report_url)
        try:
            with user_code(f"agent {self._name}", self._function):
                if inspect.iscoroutinefunction(self._function):
                    value = call()
                else:
                    value = await self._threads.run(call)
                if inspect.isawaitable(value):
                    value = await value
        except UserError:
            raise
        except Exception as error:
            said = f"agent {self._name}: {type(error).__name__}: {error}"
            raise AgentFailed(said + proxy_note(said, os.environ)) from error
        try:
            return read_report(value)
        except TypeError as error:
            raise self.error(str(error)) from error

    def refused(self, failure: AgentFailed, refusal: str) -> UserError:
        return self.error(f"{type(failure.__cause__).__name__}: {failure.__cause__}")

    def error(self, problem: str) -> CodeError:
        return contract_error(f"agent {self._name}", self._function, problem)


def load_agent(target: str) -> AgentFunction:
    """The function of `package.module:function` or `path/to/file.py:function`. Raises ConfigError."""
    function = load_target(target, "openai_proxy.target")
    if not callable(function):
        raise ConfigError(f"openai_proxy.target: expected a function, {target} is {function!r:.200}")
    try:
        signature = inspect.signature(function)
        more = {"report_url": None} if "report_url" in signature.parameters else {}
        signature.bind(sample=None, base_url=None, api_key=None, model=None, **more)
    except TypeError as error:
        raise ConfigError(
            f"openai_proxy.target: {target} must take the parameters sample, base_url, api_key, model: {error}"
        ) from error
    return cast(AgentFunction, function)
