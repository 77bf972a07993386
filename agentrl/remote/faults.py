"""What can go wrong with a call to a server, and whose fault it is."""

from __future__ import annotations

from enum import StrEnum

from agentrl.errors import InfrastructureError
from agentrl.tool import ToolError


class FaultKind(StrEnum):
    """How a server failed; the names by which faults are counted."""

    CONNECT = "connect"
    """No connection: nothing listens there, or nothing is heard from it."""
    TIMEOUT = "timeout"
    """No answer in time."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    OVERLOADED = "overloaded"
    """It refuses for now (429, 503), or has not begun in time (504)."""
    SERVER = "server"
    """It failed (5xx)."""
    ANSWER = "answer"
    """It answered with something that is no answer: a redirect, refused credentials, too many bytes."""


class RemoteFault(Exception):
    """One attempt failed through no fault of the call's. Raised by what `RemoteClient.call` is given."""

    def __init__(
        self, kind: FaultKind, problem: str, *, ran: bool = True, retry_after: float | None = None, again: bool = True
    ) -> None:
        """`ran`: the server may have done what was asked. `retry_after`: seconds before another attempt is welcome.
        `again`: another attempt may end otherwise."""
        super().__init__(problem)
        self.kind, self.ran, self.retry_after, self.again = kind, ran, retry_after, again

    @property
    def is_outage(self) -> bool:
        """It says that the server does not work, not that it is busy or was asked something odd."""
        return self.kind not in (FaultKind.OVERLOADED, FaultKind.ANSWER)


class RemoteUnavailable(InfrastructureError):
    """A call got no answer, through no fault of its own: a fault of the infrastructure."""

    def __init__(self, kind: FaultKind, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


class RemoteRefused(ToolError, InfrastructureError):
    """The server refused this very call (a status of 4xx). Its text is what the server says, cut."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail or f"status {status}")
        self.status, self.detail = status, detail
