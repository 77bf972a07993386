"""One sample that an agent acts on, the agent's report of it, and its failures."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from agentrl.errors import InfrastructureError, UserError
from agentrl.system.numbers import number_of
from agentrl.system.proxies import proxy_note
from agentrl.system.user_code import read_traceback

MODEL = "policy"
"""Name of the only model; requests may name any."""
API_KEY = "unused"
"""Key that clients insist on. The secret is in the URL."""
MOST_NUMBERS = 64
"""Numbers that a report, or all posts to a session together, may have."""
LONGEST_NAME = 100
LARGEST = 1e12
"""Largest number of a report: float32 holds its square, and sums of such."""


class AgentFailed(InfrastructureError):
    """Failure of something that the agent asked, or of its program, whose errors nobody can attribute."""

    report: Mapping[str, float] = {}
    """Numbers that hold where the session had ended before, e.g. because its budget was used up."""
    is_own_end = False
    """True: the program ended by itself, with a status that says that something went wrong."""


class AgentError(UserError):
    """Error of an agent's program, perhaps provoked only by some texts of the policy: the try is left out."""

    report: Mapping[str, float] = {}
    """Numbers as AgentFailed has them."""
    is_own_end = False
    """The same as in AgentFailed."""

    def __init__(self, message: str, reason: str) -> None:
        """`reason`: what two tries that fail in the same way have in common."""
        super().__init__(message)
        self.reason = reason


class CheckFailed(AgentError):
    """Error of the command that judges: it could not be started, however the program's session had ended."""


Door = Callable[[socket.socket], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, eq=False)
class AgentTask:
    """One sample, and the session in which an agent acts on it."""

    sample: dict[str, object]
    base_url: str
    """Address of the session. It holds the token that names it."""
    report_url: str
    """Address for scores and results. Its token is another one, which no environment variable holds: the policy's own
    tools see the environment of the agent."""
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set at the first call of the session."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the trajectory, to which a starter of agents adds its own."""
    door: Door | None = None
    """Answers at another listening socket, for this session alone, while the context is entered."""

    @classmethod
    def without_session(cls, sample: dict[str, object]) -> AgentTask:
        """Make the task of a program that asks no endpoint. Its token still names its processes."""
        base_url, report_url = (f"http://127.0.0.1/{secrets.token_urlsafe(24)}/v1" for _ in range(2))
        return cls(sample, base_url, report_url)

    @property
    def token(self) -> str:
        """Name of the session in its address."""
        return self.base_url.rsplit("/", 2)[-2]

    @property
    def report_token(self) -> str:
        """Name of the session in the address for scores."""
        return self.report_url.rsplit("/", 2)[-2]

    def count_start(self, starts: float, cpu_seconds: float) -> None:
        """Record how many processes were started for this sample, and the CPU time that their starts took."""
        self.metrics.update(agent_starts=starts, agent_start_cpu_seconds=cpu_seconds)


def extra(sample: Mapping[str, object], name: str) -> object:
    """Return a value of a row's `extra_info`; None without it."""
    info = sample.get("extra_info")
    return info.get(name) if isinstance(info, Mapping) else None


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
    """Read a mapping of names to finite numbers. Raises TypeError, beginning with `said`, for anything else.

    The names become metrics and the numbers rewards, so both have bounds.
    """
    if len(value) > MOST_NUMBERS:
        raise TypeError(f"{said}{len(value)} numbers, expected at most {MOST_NUMBERS}")
    numbers = {}
    for name, number in value.items():
        named = str(name)
        if not 0 < len(named) <= LONGEST_NAME or not named.isprintable():
            raise TypeError(f"{said}a number named {named!r:.120}, expected 1 to {LONGEST_NAME} printable characters")
        known = number_of(number)
        if known is None or not abs(known) <= LARGEST:
            raise TypeError(f"{said}{named}={number!r:.100}, expected a finite number of at most {LARGEST:g}")
        numbers[named] = known
    return numbers


def blamed(problem: str, said: str, secret: str, environment: Mapping[str, str]) -> AgentError | AgentFailed:
    """Make the error of a program that wrote `said`: its own where that ends with the traceback of no fault.

    `secret`: a text that differs from try to try.
    """
    raised = read_traceback(said)
    if raised is not None and not raised[1]:
        return AgentError(problem, raised[0].replace(secret, ""))
    return AgentFailed(problem + proxy_note(said, environment))
