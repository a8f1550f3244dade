"""What every request passes before it reaches its route: an id, the key, the size limit, and a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from shoal.serve.errors import ApiError
from shoal.serve.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("shoal.serve")
LAST_WORDS = 10.0
"""Seconds that a client has to take the error which says that its time is up."""
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class TooLarge(ApiError):
    """The body goes beyond the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the request is larger than {limit} bytes, which is this server's limit")


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
            self._check(scope["path"], headers)
            with self._patience(line):
                await self._app(scope, self._bounded(receive), answer)
        except ApiError as error:
            await JSONResponse(error.to_dict(), error.status)(scope, receive, answer)
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

    def _check(self, path: str, headers: Headers) -> None:
        keys = self._settings.api_keys
        if keys and path.startswith(("/v1/", "/playground/", "/tokenize", "/detokenize", "/props")):
            given = headers.get("authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
            matches = [hmac.compare_digest(given, key.encode("utf-8")) for key in keys]
            if not any(matches):
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
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
