"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from agentrl.system.json_value import JSON


class ApiError(Exception):
    """Error that a caller is answered instead of a completion."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, JSON]:
        """Make the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unknown_session() -> ApiError:
    """Make the error for a session that does not exist or has ended."""
    return ApiError(404, "This session does not exist or has ended.", code="session_not_found")
