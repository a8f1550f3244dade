"""Errors, in the form of the API that was asked: OpenAI's, Anthropic's, or Ollama's."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response

LOG = logging.getLogger("shoal.serve")
MESSAGES_ROUTE, OLLAMA_ROUTE, SPEECH_ROUTE = "/v1/messages", "/api/", "/v1/audio/"
"""Beginnings of the routes of Anthropic's form, of Ollama's, and of those that are sent sound."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPICS = {**_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
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

    def to_dict(self, path: str = "") -> dict[str, Any]:
        """The response body on that route."""
        if path.startswith(MESSAGES_ROUTE):
            kind = _ANTHROPICS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if path.startswith(OLLAMA_ROUTE):
            return {"error": self.message}
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        """The response on that route."""
        from starlette.responses import JSONResponse  # the command line checks settings without it

        return JSONResponse(self.to_dict(path), self.status, self._headers)

    def event(self, path: str) -> bytes:
        """The last event of a stream on that route."""
        if path.startswith(OLLAMA_ROUTE):
            return f"{json.dumps(self.to_dict(path))}\n".encode()
        head = "event: error\n" if path.startswith(MESSAGES_ROUTE) else ""
        return f"{head}data: {json.dumps(self.to_dict(path))}\n\n".encode()


def no_model(name: str, *served: str) -> ApiError:
    """A 404 for an unknown model."""
    told = ", ".join(map(repr, served))
    return ApiError(404, f"there is no model {name!r} here, only {told}", param="model", code="model_not_found")


def hears() -> ApiError:
    """A 400 for a request for text to a model of speech."""
    return ApiError(400, "this model hears speech; send a file to /v1/audio/transcriptions", param="model")


def no_chat() -> ApiError:
    """A 400 for more than a prompt to a model whose encoder reads one."""
    return ApiError(400, "this model answers a prompt that its encoder reads, and does nothing else; send the text to "
                    "/v1/completions", param="model")


def refused(param: str, message: str) -> ApiError:
    """A 400 about one field."""
    return ApiError(400, message, param=param)


def failed(what: str, error: BaseException) -> ApiError:
    """A 500 for an error of the server, which goes to its log."""
    LOG.error("%s failed", what, exc_info=error)
    return ApiError(500, "the server failed; its log says why", code="internal_error")
