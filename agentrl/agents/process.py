"""Processes of agents: the environment that they see, and the messages about their end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agentrl.agents.agent import Agent
from agentrl.agents.task import AgentError, AgentFailed, blamed
from agentrl.errors import CodeError, UserError
from agentrl.remote.credentials import Secrets, passed_secrets
from agentrl.system.processes import LocalProcess, Process, signal_name
from agentrl.system.proxies import spare_own_addresses
from agentrl.system.user_code import PATHS

PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "NODE_PATH", "SSL_CERT_FILE"),
)
"""Environment variables of the trainer that a command sees. All others, and with them the trainer's secrets, it does
not."""


class ProgramAgent(Agent):
    """Agent that is a program, whose errors are only known by what it writes."""

    name = "agent"
    """Name of the program in messages."""

    def refused(self, failure: AgentFailed, refusal: str) -> UserError:
        return AgentError(str(failure), refusal)

    def error(self, problem: str) -> CodeError:
        return CodeError(f"{self.name}: {problem}")


class AgentProcess:
    """Process of an agent, and what may be said of its end."""

    def __init__(self, process: Process, secret: str, environment: Mapping[str, str], hidden: Secrets) -> None:
        """`secret`: a text that differs from try to try. `hidden`: from messages."""
        self.process = process
        self._secret, self._environment, self._hidden = secret, environment, hidden

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        passed_on: Iterable[str],
        more: Mapping[str, str],
        secret: str,
        *,
        folder: Path | None = None,
        key: str = "openai_proxy.command",
    ) -> AgentProcess:
        """Start a command of this machine with the variables `passed_on` of this process, and `more`.

        `folder`: its working folder; None: this process's. Raises AgentError, which names `key`, where the program is
        not there, AgentFailed for other reasons.
        """
        passed_on = tuple(passed_on)
        environment = {name: os.environ[name] for name in (*PASSED_ON, *passed_on) if name in os.environ}
        environment |= more
        spare_own_addresses(environment)
        try:
            process = await LocalProcess.start(command, environment, secret, folder=folder)
        except OSError as error:
            problem = f"{key} {list(command)}: {error}"
            raise (AgentError(problem, problem) if isinstance(error, PATHS) else AgentFailed(problem)) from error
        return cls(process, secret, environment, passed_secrets(passed_on))

    def said(self, *, both: bool = False) -> str:
        """Return the end of its output: of stderr if it wrote there, else of stdout; `both`: of stdout, then stderr."""
        out, err = (bytes(self.process.tails[each]).decode(errors="replace").strip() for each in (1, 2))
        return self._hidden.hide(f"{out}\n{err}".strip() if both else err or out)

    def failure(self, name: str, *, both: bool = False) -> AgentError | AgentFailed:
        """Make the error for a process called `name` that ended; `both`: some programs write errors to stdout."""
        status, said = self.process.status, self.said(both=both)
        assert status is not None
        ended = f"status {status}" if status >= 0 else f"signal {signal_name(-status)}"
        problem = f"{name} ended with {ended}: {said or 'it wrote nothing'}"
        return blamed(problem, said if status > 0 else "", self._secret, self._environment)
