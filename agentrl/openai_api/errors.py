"""Errors that callers are answered; a dialect writes them in its shape."""

from __future__ import annotations


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
    return ApiError(404, "This session does not exist or has ended.", code="session_not_found")
