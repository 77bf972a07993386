"""The contract of agents that speak to the endpoint, however they are started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from agentrl.agents.session_queue import SessionQueue
from agentrl.agents.task import AgentFailed, AgentTask
from agentrl.containers.contract import ContainerOptions
from agentrl.errors import CodeError, UserError


class AgentOptions(BaseModel, frozen=True):
    """The keys `openai_proxy.*`."""

    start: str = "auto"
    """Name of the starter in `agentrl.config.registries.AGENT_STARTERS`."""
    target: str | None = None
    """Function of the agent: `package.module:function` or `path/to/file.py:function`."""
    command: Sequence[str] | None = None
    """Program of the agent, with its arguments; of a harness, the program that it starts."""
    harness: str | None = None
    """Name of the harness in `agentrl.config.registries.HARNESSES`."""
    harness_options: Mapping[str, object] = {}
    """Options of the harness."""
    check: Sequence[str] | None = None
    """Command that judges the working folder that a harness's program leaves."""
    check_timeout: float = 60.0
    """Seconds that the command may take."""
    pass_env: Sequence[str] = ()
    """Names of further environment variables of the trainer that the command may see."""
    container: ContainerOptions = ContainerOptions()
    """The container in which the command, or a harness's program, acts."""
    processes: int = 1
    """Processes of a pool."""
    sessions_at_once: int = 1
    """Sessions that one connection of an agent has at once."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens at."""
    port: int = 0
    """Port of the endpoint; 0: any that is free."""
    token_env: str | None = None
    """Environment variable with the token of remote agents."""
    train: str | Sequence[str] = "auto"
    """Transcripts of a session that are trained on: `auto`, `all`, `main`, models, or a function
    (`agentrl.openai_api.selection`)."""
    feedback_timeout: float = 0.0
    """Seconds after the agent's end in which a score may still be posted."""
    strict: bool = False
    """True: a request with a field that the endpoint does not know is refused; False: the field is dropped."""


class Agent(ABC):
    """Program that acts on samples through the endpoint.

    A starter of agents is a function from `AgentOptions` to an `Agent`; it raises ConfigError.
    """

    async def start(self, queue: SessionQueue) -> None:  # noqa: B027 - most agents need nothing
        """Begin, before the first sample. `queue`: hands sessions to programs that ask the endpoint for them."""

    async def close(self) -> None:  # noqa: B027
        """End everything that `start` began."""

    @abstractmethod
    async def run(self, task: AgentTask) -> dict[str, float]:
        """Act on one sample; return its report. When cancelled, all of it that can be stopped is stopped.

        Raises AgentFailed for what may pass, AgentError or CodeError for an error of its code.
        """

    @abstractmethod
    def refused(self, failure: AgentFailed, refusal: str) -> UserError:
        """Make the error for a failure caused by the endpoint's `refusal` of a request."""

    @abstractmethod
    def error(self, problem: str) -> CodeError:
        """Make the error for an agent that broke its contract."""
