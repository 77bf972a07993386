"""Errors that callers are answered; a dialect writes them in its shape."""

from __future__ import annotations

NO_ROOM = "context_length_exceeded"
"""Code of a request for which a session has no room."""


class ApiError(Exception):
    """Error that a caller is answered instead of a completion."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def unknown_session() -> ApiError:
    """Make the error for a session that does not exist or has ended."""
    message = (
        "This session does not exist or has ended. The base URL is the one that the agent was given: base_url of a "
        "function, OPENAI_BASE_URL or ANTHROPIC_BASE_URL of a command."
    )
    return ApiError(404, message, code="session_not_found")
