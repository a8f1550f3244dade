"""Just enough of an HTTP client for streams: it must take next to no time from a server on the same processors."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

_LIMIT = 1 << 24
"""Most bytes of a line."""


class Failed(Exception):
    """No answer, or not the one that was asked for; the message says what came instead."""


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes:
        url: its root, such as http://127.0.0.1:8000; a path is put before every route.
        key: sent as a bearer token; None for none.
    """

    url: str
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the address is {self.url!r}; it must look like http://127.0.0.1:8000")

    @property
    def parts(self) -> SplitResult:
        """The address in its parts."""
        return urlsplit(self.url)


async def events(address: Address, route: str, body: Mapping[str, Any]) -> AsyncIterator[tuple[float, bytes]]:
    """Ask, and yield every server-sent event with the moment at which it came (`time.perf_counter`).

    Raises:
        Failed: the server cannot be reached, breaks off, or answers with another status than 200.
    """
    async for moment, line in _lines(address, "POST", route, json.dumps(body).encode()):
        if line.startswith(b"data:"):
            yield moment, line[5:].strip()


async def get(address: Address, route: str) -> bytes:
    """The body of an answer to GET; raises like `events`."""
    return b"\n".join([line async for _, line in _lines(address, "GET", route, b"")])


async def _lines(address: Address, verb: str, route: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
    writer = None
    try:
        reader, writer = await _connect(address)
        writer.write(_head(address, verb, route, len(body)) + body)
        await writer.drain()
        status, headers = await _answer(reader)
        rest = b""
        refusal: list[bytes] = []
        async for piece in _pieces(reader, headers):
            moment = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if status == 200:
                    yield moment, line
                refusal.append(line)
        if status != 200:
            raise Failed(f"{status} {b' '.join([*refusal, rest]).decode(errors='replace')[:300]}".strip())
        if rest:
            yield time.perf_counter(), rest
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    finally:
        if writer is not None:
            writer.close()


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = address.parts
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    return await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=_LIMIT)


def _head(address: Address, verb: str, route: str, length: int) -> bytes:
    parts = address.parts
    lines = [
        f"{verb} {parts.path.rstrip('/')}{route} HTTP/1.1",
        f"host: {parts.netloc.rpartition('@')[2]}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {length}",
        *([] if address.key is None else [f"authorization: Bearer {address.key}"]),
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await reader.readline()).decode("latin-1").split(maxsplit=2)
    if len(words) < 2 or not words[1].isdigit():
        raise Failed("the server closed the connection without an answer")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return int(words[1]), headers


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body as it comes."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece
