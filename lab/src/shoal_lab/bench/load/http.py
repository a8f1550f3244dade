"""Streams over HTTP, with the time at which each event came.

Every event costs the client processor time, which a server on the same machine then lacks.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shoal.errors import needs

if TYPE_CHECKING:
    import httpx


def library() -> Any:
    """Import httpx.

    Raises:
        Unsupported: it is not installed.
    """
    with needs("bench", "a load on a server", "shoal-lab"):
        import httpx
    return httpx


class Failed(Exception):
    """There was no answer, or not the expected one; the message says what came instead."""


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes:
        url: its root, such as http://127.0.0.1:8000; a path in it comes before every route.
        key: bearer token; None to send none.
    """

    url: str
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the address is {self.url!r}; it must look like http://127.0.0.1:8000")

    def options(self) -> dict[str, Any]:
        """Options of httpx's clients: a new connection for every request, plain bytes, no proxy, no limits."""
        headers = {"accept-encoding": "identity", "connection": "close"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        verify = ssl.create_default_context() if urlsplit(self.url).scheme == "https" else False
        return {"base_url": self.url, "headers": headers, "verify": verify, "trust_env": False, "timeout": None,
                "limits": library().Limits()}


async def events(
    client: httpx.AsyncClient, route: str, body: Mapping[str, Any]
) -> AsyncIterator[tuple[float, bytes]]:
    """Send a request, and yield every server-sent event with the time at which it came (`time.perf_counter`).

    Lines are split here, because httpx would also split at Unicode's line ends within JSON strings.

    Raises:
        Failed: the server cannot be reached, breaks off, or answers with another status than 200.
    """
    with _failing():
        async with client.stream("POST", route, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                _check(answer)
            rest = b""
            async for piece in answer.aiter_raw():
                moment = time.perf_counter()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield moment, line[5:].strip()
            if rest.startswith(b"data:"):
                yield time.perf_counter(), rest[5:].strip()


def get(address: Address, route: str) -> bytes:
    """The body of a GET request; raises like `events`."""
    with _failing(), library().Client(**address.options()) as client:
        answer = client.get(route)
        _check(answer)
        return bytes(answer.content)


@contextmanager
def _failing() -> Iterator[None]:
    httpx = library()
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error


def _check(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        said = answer.content.replace(b"\n", b" ").decode(errors="replace")
        raise Failed(f"{answer.status_code} {said[:300]}".strip())
