"""Checks of every request before its route, by key, host, origin and size, and its line in the log.

A browser lets any page send requests to any address and only hides the answer. A page whose own host name was rebound
to this machine can read the answer as well (DNS rebinding). So requests from other sites' pages and for other host
names are refused. Clients other than browsers send only Host of the headers checked for that.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import Awaitable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.serve.errors import LOG, ApiError
from shoal.serve.settings import Settings

KEY = "shoal.key"
"""The scope's entry for the key that a request gave, "" where none is asked for."""
LAST_WORDS = 10.0
"""Seconds that a client has to receive the timeout error."""
GONE = 499
"""Status in the log if the client left before its answer; nobody receives it."""
_BEARER = re.compile(r"\s*bearer\s+(\S.*?)\s*", re.IGNORECASE)
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


T = TypeVar("T")


def too_large(limit: int) -> ApiError:
    """A 413 for a body that exceeds the limit."""
    return ApiError(413, f"the request is larger than {limit} bytes, which is this server's limit")


class Gate:
    """Checks and logs requests. It is pure ASGI, so that streams pass unbuffered."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
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
            scope[KEY] = self._check(scope["method"], scope["path"], headers)
            with self._patience(line):
                as_get = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # uvicorn sends no body
                await self._app(as_get, self._bounded(receive, scope["path"]), answer)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, answer)
        except ClientDisconnect:  # before its request was complete, or its answer
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
        """Cancel the request of a client that neither sends it nor receives its answer in time."""
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
            if "status" not in line:  # such as one that waited long for its model
                raise ApiError(504, "the request took longer than the server allows", code="timeout") from None
            line["status"] = "given up"
        finally:
            left.cancel()

    def _check(self, method: str, path: str, headers: Headers) -> str:
        """The key of a request, "" where none is asked for; ApiError for one that may not pass."""
        key = ""
        if "content-length" in headers and "transfer-encoding" in headers:
            # a proxy in front may have used the other one (request smuggling)
            raise ApiError(400, "the request has Content-Length and Transfer-Encoding; send one of them",
                           headers={"connection": "close"})
        check_host(headers, self._settings.hosts)
        if self._settings.api_keys and path.startswith(_KEYED):
            key = key_of(headers, self._settings.api_keys)  # a page with a key was given it, so its origin may be any
        else:
            check_origin(method, headers, self._settings.cors_origins)
        length, limit = headers.get("content-length", "0"), self._settings.limit_of(path)
        if length.isdigit() and int(length) > limit:
            raise too_large(limit)
        return key

    def _bounded(self, receive: Receive, path: str) -> Receive:
        """`receive`, with an error if the body exceeds the limit without having said so in a header."""
        seen, limit = 0, self._settings.limit_of(path)

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise too_large(limit)
            return message

        return bounded


_KEYED = ("/v1/", "/api/", "/models", "/playground/", "/rerank", "/infill", "/tokenize", "/detokenize", "/props")
"""Beginnings of the routes that ask for a key."""


def key_of(headers: Headers, keys: Sequence[str]) -> str:
    """The one of the keys that is in `Authorization: Bearer KEY` or `x-api-key: KEY`; ApiError 401 if none is."""
    asked = headers.get("authorization", "")
    bearer = _BEARER.fullmatch(asked)
    given = [word.encode("utf-8", "replace")
             for word in (bearer[1] if bearer else "", headers.get("x-api-key", "").strip())]
    matches = [key for one in given for key in keys if hmac.compare_digest(one, key.encode("utf-8"))]
    if not matches:
        form = "" if bearer or not asked else "; Authorization must be `Bearer KEY`"
        raise ApiError(401, f"the API key is missing or wrong{form}", code="invalid_api_key")
    return matches[0]


async def _cut_off(begun: bool, scope: Scope, receive: Receive, send: Send) -> None:
    """Tell a client that the server stopped; if its answer has begun, as the last event of the stream."""
    error = ApiError(503, "the server stopped before the answer was complete", code="shutting_down", headers={})
    if begun:
        await send({"type": "http.response.body", "body": error.event(scope["path"]), "more_body": False})
    else:
        await error.response(scope["path"])(scope, receive, send)


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """The result of some work; ClientDisconnect, and an end of the work, if the client leaves before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def note(scope: Any, **facts: Any) -> None:
    """Add facts to the request's line in the log."""
    scope["shoal.log"].update({name: fact for name, fact in facts.items() if fact is not None})


LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Origins of pages served by this machine."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::(\d{1,5}))?", re.ASCII | re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


def check_host(headers: Headers, hosts: Collection[str]) -> None:
    """ApiError 403 for a request to a host name that is not the server's."""
    for value in headers.getlist("host") if hosts else ():
        found = _HOST.fullmatch(value.strip())
        name = None if found is None else found[1].lower().rstrip(".")
        if name not in hosts and value.strip().lower() not in hosts:
            raise ApiError(403, f"this server answers no requests for the host {value[:200]!r}; the operator may allow "
                           "it with --allowed-host", code="host_not_allowed")


def check_origin(method: str, headers: Headers, allowed: Collection[str]) -> None:
    """ApiError 403 for a request from a page that is not the server's own, of this machine, or allowed."""
    if "*" in allowed:
        return
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "").strip().lower()
    if origin is None:
        opened = method in ("GET", "HEAD") and headers.get("sec-fetch-mode", "").strip().lower() == "navigate"
        foreign = site == "cross-site" and not opened  # a link to the page may be followed from anywhere
    else:
        known = origin in allowed or re.fullmatch(LOCAL, origin, re.IGNORECASE) is not None
        foreign = not (known or site == "same-origin" or (not site and _is_own(origin, headers.get("host", ""))))
    if foreign:
        asking = f"pages of {origin[:200]!r}" if origin is not None else "pages of other sites"
        raise ApiError(403, f"{asking} may not use this server; the operator may allow them with --cors-origin",
                       code="origin_not_allowed")


def _is_own(origin: str, host: str) -> bool:
    """Whether a page's origin is the request's host, for browsers that send no Sec-Fetch-Site over http."""
    try:
        parts = urlsplit(origin)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return False
    found = _HOST.fullmatch(host.strip())
    if found is None or parts.hostname is None:
        return False
    return found[1].lower().strip("[]") == parts.hostname and int(found[2] or _PORTS.get(parts.scheme, 0)) == port
