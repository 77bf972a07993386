"""Agents that are commands, started as a process for each sample."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from agentrl.agents.agent import Agent, AgentOptions
from agentrl.agents.process import AgentProcess, ProgramAgent
from agentrl.agents.task import API_KEY, MODEL, AgentError, AgentTask, read_report
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.system.processes import Process


def build(options: AgentOptions) -> Agent:
    """Make the agent that `openai_proxy.command` names. Raises ConfigError."""
    if options.command is None or options.target is not None:
        raise ConfigError("openai_proxy.start=process: set openai_proxy.command, and not openai_proxy.target")
    return CommandAgent(options.command, passed_on=options.pass_env)


class CommandAgent(ProgramAgent):
    """Agent that is a command.

    It is given the sample as JSON on stdin, with the address `report_url` for scores. Its session it finds in the
    variables that OpenAI's and Anthropic's clients read (OPENAI_BASE_URL, ANTHROPIC_BASE_URL, ..._API_KEY, ..._MODEL).
    It must end with status 0. A JSON object on the last line of its output is its report. When it ends, and when it is
    cancelled, every process that it started is killed.
    """

    def __init__(self, command: Sequence[str], *, passed_on: Sequence[str] = ()) -> None:
        """`passed_on`: further variables of this process's environment that the command may see. Raises ConfigError."""
        if not command:
            raise ConfigError("openai_proxy.command is empty")
        self._command, self._passed_on = list(command), passed_on
        self.name = f"agent command {' '.join(command)}"

    async def run(self, task: AgentTask) -> dict[str, float]:
        sample = json.dumps({**task.sample, "report_url": task.report_url}, default=str).encode()
        process = await AgentProcess.start(
            self._command, self._passed_on, session_variables(task.base_url), task.base_url
        )
        await act(process.process, task, sample)
        name = f"agent command {self._command[0]}"
        if process.process.status != 0:
            raise process.failure(name)
        try:
            return read_report(_last_object(bytes(process.process.tails[1])))
        except TypeError as error:  # It may have printed the policy's text.
            raise AgentError(f"{name}: {error}", str(error)) from error


def session_variables(base_url: str) -> dict[str, str]:
    """Name a session in the environment variables that clients read."""
    variables: dict[str, str] = {}
    for vendor, address in (("OPENAI", base_url), ("ANTHROPIC", base_url.removesuffix("/v1"))):
        named = {"BASE_URL": address, "API_KEY": API_KEY, "MODEL": MODEL}
        variables |= {f"{vendor}_{name}": value for name, value in named.items()}
    return variables


async def act(process: Process, task: AgentTask, stdin: bytes) -> None:
    """Give a started process its input, count its start, and wait for its end."""
    measuring = asyncio.create_task(_count_start(process, task))
    try:
        process.give(stdin)
        await process.ended()
    finally:
        measuring.cancel()


async def _count_start(process: Process, task: AgentTask) -> None:
    """Record the CPU time until the first call."""
    await task.called.wait()
    task.count_start(1.0, await asyncio.to_thread(process.cpu_seconds))


def _last_object(output: bytes) -> dict[str, JSON] | None:
    lines = output.decode(errors="replace").strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return None
    try:
        value = json.loads(lines[-1])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
