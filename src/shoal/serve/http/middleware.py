"""What every request passes before its route: who asks, from where, how much, and a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from shoal.serve.http.errors import ApiError
from shoal.serve.http.origins import check_host, check_origin
from shoal.serve.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("shoal.serve")
LAST_WORDS = 10.0
"""Seconds that a client has to take the error which says that its time is up."""
GONE = 499
"""Status for the log where the client left before its answer; nobody receives it."""
_BEARER = re.compile(r"\s*bearer\s+(\S.*?)\s*", re.IGNORECASE)
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class TooLarge(ApiError):
    """The body goes beyond the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the request is larger than {limit} bytes, which is this server's limit")


class TwoLengths(ApiError):
    """Two headers say where the body ends; whoever stands before the server may have believed the other one."""

    def __init__(self) -> None:
        super().__init__(400, "the request has Content-Length and Transfer-Encoding; send one of them")


class Gate:
    """Pure ASGI, so that streams pass unbuffered.

    Args:
        app: what lies behind.
        settings: keys and limits.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, headers = time.monotonic(), Headers(scope=scope)
        given = headers.get("x-request-id", "")
        line: dict[str, Any] = {"id": given if _ID.fullmatch(given) else uuid.uuid4().hex}
        line.update(method=scope["method"], path=scope["path"])
        scope["shoal.log"] = line

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = line["id"]
                line["status"] = message["status"]
            await send(message)

        try:
            self._check(scope["method"], scope["path"], headers)
            with self._patience(line):
                await self._app(scope, self._bounded(receive), answer)
        except ApiError as error:
            await JSONResponse(error.to_dict(), error.status, _beside(error))(scope, receive, answer)
        except ClientDisconnect:  # before its request was here as a whole
            line["status"] = GONE
        except asyncio.CancelledError:
            if not getattr(scope["app"].state, "stopping", bool)():
                raise
            begun, line["status"] = "status" in line, "cut off by the shutdown"
            with suppress(Exception, asyncio.CancelledError):
                await _cut_off(begun, scope, receive, send)
        finally:
            line["seconds"] = round(time.monotonic() - started, 4)
            LOG.info(json.dumps({"event": "request", **line}))

    @contextmanager
    def _patience(self, line: dict[str, Any]) -> Iterator[None]:
        """Give up on a client that neither sends its request nor takes its answer."""
        task, timeout = asyncio.current_task(), self._settings.timeout
        if task is None or timeout is None:
            yield
            return
        left = asyncio.get_running_loop().call_later(timeout + LAST_WORDS, task.cancel)
        try:
            yield
        except asyncio.CancelledError:
            if left.when() > asyncio.get_running_loop().time():
                raise
            line["status"] = "given up"
        finally:
            left.cancel()

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            raise TwoLengths
        check_host(headers, self._settings.hosts)
        if self._settings.api_keys and path.startswith(_KEYED):
            check_key(headers, self._settings.api_keys)  # a page that has one was given it
        else:
            check_origin(method, headers, self._settings.cors_origins)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body:
            raise TooLarge(self._settings.max_body)

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` that refuses a body whose length was not announced and goes beyond the limit."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._settings.max_body:
                raise TooLarge(self._settings.max_body)
            return message

        return bounded


_KEYED = ("/v1/", "/playground/", "/tokenize", "/detokenize", "/props")
"""Beginnings of the routes that ask for a key."""


def check_key(headers: Headers, keys: Sequence[str]) -> None:
    """Refuse a request with none of the keys, in `Authorization: Bearer KEY` or `x-api-key: KEY`; ApiError 401."""
    asked = headers.get("authorization", "")
    bearer = _BEARER.fullmatch(asked)
    given = [word.encode("utf-8", "replace")
             for word in (bearer[1] if bearer else "", headers.get("x-api-key", "").strip())]
    matches = [hmac.compare_digest(one, key.encode("utf-8")) for one in given for key in keys]
    if not any(matches):
        form = "" if bearer or not asked else "; Authorization must be `Bearer KEY`"
        raise ApiError(401, f"the API key is missing or wrong{form}", code="invalid_api_key")


def _beside(error: ApiError) -> dict[str, str] | None:
    """Headers that belong to an error."""
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    return {"connection": "close"} if isinstance(error, TwoLengths) else None


async def _cut_off(begun: bool, scope: Scope, receive: Receive, send: Send) -> None:
    """Tell a client why its answer ends here; of an answer that has begun, in a stream's last event."""
    error = ApiError(503, "the server stopped before the answer was complete", code="shutting_down")
    if begun:
        body = f"data: {json.dumps(error.to_dict())}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": False})
    else:
        await JSONResponse(error.to_dict(), error.status)(scope, receive, send)


def note(scope: Any, **facts: Any) -> None:
    """Add facts to the request's line in the log."""
    scope["shoal.log"].update({name: fact for name, fact in facts.items() if fact is not None})
