"""One sample that an agent acts on, what the agent reports of it, and how it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.errors import InfrastructureError, UserError
from agentrl.system.numbers import finite
from agentrl.system.proxies import proxy_note
from agentrl.system.user_code import read_traceback

MODEL = "policy"
"""Name of the only model; requests may name any."""
API_KEY = "unused"
"""Key that clients insist on. The secret is in the URL."""


class AgentFailed(InfrastructureError):
    """Failure of something that the agent asked, or of its program, whose errors nobody can attribute."""


class AgentError(UserError):
    """Error of an agent's program, perhaps provoked only by some texts of the policy: the try is left out."""

    def __init__(self, message: str, reason: str) -> None:
        """`reason`: what two tries that fail in the same way have in common."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class AgentTask:
    """One sample, and the session in which an agent acts on it."""

    sample: dict[str, object]
    base_url: str
    """Address of the session. It holds the token that names it."""
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set at the first call of the session."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the trajectory, to which a starter of agents adds its own."""

    @property
    def token(self) -> str:
        """Name of the session in its address."""
        return self.base_url.rsplit("/", 2)[-2]

    def count_start(self, starts: float, cpu_seconds: float) -> None:
        """Record how many processes were started for this sample, and the CPU time that their starts took."""
        self.metrics.update(agent_starts=starts, agent_start_cpu_seconds=cpu_seconds)


def read_report(value: object) -> dict[str, float]:
    """Read an agent's report: None, or a mapping of names to finite numbers. Raises TypeError for anything else.

    `reward` goes to its last assistant turn, `score` to the scorer `reported`, and others to `score_extra`.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"it returned {type(value).__name__}, expected None or a mapping of names to numbers")
    return read_numbers(value, "it returned ")


def read_numbers(value: Mapping[object, object], said: str = "") -> dict[str, float]:
    """Read a mapping of names to finite numbers. Raises TypeError, beginning with `said`, for anything else."""
    numbers = {}
    for name, number in value.items():
        if (known := finite(number)) is None:
            raise TypeError(f"{said}{name}={number!r:.100}, expected a finite number")
        numbers[str(name)] = known
    return numbers


def blamed(problem: str, said: str, secret: str, environment: Mapping[str, str]) -> AgentError | AgentFailed:
    """Make the error of a program that wrote `said`: its own where that ends with the traceback of no fault.

    `secret`: a text that differs from try to try.
    """
    raised = read_traceback(said)
    if raised is not None and not raised[1]:
        return AgentError(problem, raised[0].replace(secret, ""))
    return AgentFailed(problem + proxy_note(said, environment))
