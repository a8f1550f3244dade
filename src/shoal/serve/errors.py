"""Errors in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response

LOG = logging.getLogger("shoal.serve")
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}


class ApiError(Exception):
    """An error for the client: `param` is the field in error, `code` is for programs; `headers` follow the status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self._headers = _HEADERS.get(status) if headers is None else headers

    def to_dict(self) -> dict[str, Any]:
        """The response body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The response."""
        from starlette.responses import JSONResponse  # the command line checks settings without it

        return JSONResponse(self.to_dict(), self.status, self._headers)


def no_model(name: str, served: str) -> ApiError:
    """A 404 for an unknown model."""
    return ApiError(404, f"there is no model {name!r} here, only {served!r}", param="model", code="model_not_found")


def refused(param: str, message: str) -> ApiError:
    """A 400 about one field."""
    return ApiError(400, message, param=param)


def failed(what: str, error: BaseException) -> ApiError:
    """A 500 for an error of the server, which goes to its log."""
    LOG.error("%s failed", what, exc_info=error)
    return ApiError(500, "the server failed; its log says why", code="internal_error")
