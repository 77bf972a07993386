"""Faults of calls to servers, by kind and by whose fault they are."""

from __future__ import annotations

from enum import StrEnum

from agentrl.errors import InfrastructureError
from agentrl.tool import ToolError


class FaultKind(StrEnum):
    """Way in which a server failed; faults are counted under these names."""

    CONNECT = "connect"
    """No connection: nothing listens there, or nothing is heard from it."""
    TIMEOUT = "timeout"
    """No answer in time."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    OVERLOADED = "overloaded"
    """The server refuses for now (429, 503), or has not begun in time (504)."""
    SERVER = "server"
    """The server failed (5xx)."""
    ANSWER = "answer"
    """The answer is no answer: a redirect, refused credentials, too many bytes."""


class RemoteFault(Exception):
    """Failure of one attempt, through no fault of the call's. Raised by the `attempt` of `RemoteClient.call`."""

    def __init__(
        self, kind: FaultKind, problem: str, *, ran: bool = True, retry_after: float | None = None, again: bool = True
    ) -> None:
        """`ran`: the server may have run the request. `retry_after`: seconds before another attempt is welcome.
        `again`: another attempt may end otherwise."""
        super().__init__(problem)
        self.kind, self.ran, self.retry_after, self.again = kind, ran, retry_after, again


class RemoteUnavailable(InfrastructureError):
    """Infrastructure fault: a call got no answer, through no fault of its own."""

    def __init__(self, kind: FaultKind, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


class RemoteRefused(ToolError, InfrastructureError):
    """Refusal of this very call by the server (a status of 4xx). Its text is the server's message, cut."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail or f"status {status}")
        self.status, self.detail = status, detail
