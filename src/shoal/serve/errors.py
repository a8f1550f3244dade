"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error to send to the client.

    Args:
        status: HTTP status.
        message: what is wrong and what to do.
        param: the field in error.
        code: a short code for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """The response body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def no_model(name: str, served: str) -> ApiError:
    """A 404 for an unknown model."""
    return ApiError(404, f"there is no model {name!r} here, only {served!r}", param="model", code="model_not_found")


def refused(param: str, message: str) -> ApiError:
    """A 400 about one field."""
    return ApiError(400, message, param=param)
