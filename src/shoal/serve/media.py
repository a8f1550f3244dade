"""Pictures and films at http addresses, fetched where the operator allows it.

Only hosts that the operator lists are asked, and an address is checked before it is connected to, so that a request
cannot reach what lies behind the server (server-side request forgery, CWE-918). Size, time and redirects are bounded.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import reprlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from shoal.engine.chats import MOST
from shoal.engine.messages import shown_in
from shoal.engine.picture_files import MOST_BYTES, url_of
from shoal.errors import Unsupported

SECONDS = 10.0
"""For all pictures and films of a conversation."""
MOST_REDIRECTS = 2
_SCHEMES = ("http", "https")
_FETCHED = {"image": "image_url", "video": "video_url"}
"""Kinds of what is fetched, and the type of its part."""
_MOVED = (301, 302, 303, 307, 308)
_ASKED = {"Accept": "image/*, video/*", "Accept-Encoding": "identity", "User-Agent": "shoal"}
_KEPT = "%/:=&?~#+!$,;'@()*[]"
"""What stands in a path and a query as it is."""
_MAPPED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses of a gateway to IPv4, which end in the IPv4 address (RFC 6052)."""
_DATA = "Send it as a data URL, such as data:image/png;base64,..."
_threads = ThreadPoolExecutor(8, "shoal-fetching")


async def with_fetched(
    messages: Sequence[Mapping[str, Any]], allowed: Sequence[str], most: int
) -> Sequence[Mapping[str, Any]]:
    """Messages with data URLs in place of http addresses, which are asked in a thread; as they are if none is allowed.

    Args:
        messages: as `shoal.engine.messages.plain` makes them.
        allowed: hosts, as `shoal.serve.settings.media_domain` reads them.
        most: bytes of all pictures and films together; of one also at most `MOST_BYTES`.

    Raises:
        ValueError: one cannot be had within the bounds, or a picture is none.
        Unsupported: its host, or one to which that points, is not allowed.
    """
    shown = shown_in(messages)[1]
    named = [*dict.fromkeys(
        one for one in shown if one[0] in _FETCHED and one[1].partition(":")[0].lower() in _SCHEMES)]
    if not allowed or not named or len(shown) > MOST:
        return messages
    found = await asyncio.get_running_loop().run_in_executor(_threads, _all, named, allowed, most)
    return [_replaced(message, found) for message in messages]


def _replaced(message: Mapping[str, Any], found: Mapping[tuple[str, str], str]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part, found) for part in content]}


def _part(part: Mapping[str, Any], found: Mapping[tuple[str, str], str]) -> Mapping[str, Any]:
    kind, key = next(((kind, key) for kind, key in _FETCHED.items() if key == part["type"]), ("", ""))
    url = found.get((kind, part[key]["url"])) if key else None
    return part if url is None else {"type": key, key: {"url": url}}


def _all(named: Sequence[tuple[str, str]], allowed: Sequence[str], most: int) -> dict[tuple[str, str], str]:
    """The data URL of each kind and address, one after the other."""
    until, left, found = time.monotonic() + SECONDS, most, dict[tuple[str, str], str]()
    for kind, url in named:
        data = fetched(url, allowed, min(left, MOST_BYTES), until)
        left -= len(data)
        if left < 0 or len(data) > MOST_BYTES:
            raise ValueError(f"a conversation's pictures and films have more than {min(most, MOST_BYTES) / 2**20:g} "
                             "MiB, the most that is fetched; send smaller ones")
        found[kind, url] = (url_of(data) if kind == "image" else  # a film is opened where it is read
                            f"data:video/mp4;base64,{base64.b64encode(data).decode()}")
    return found


def fetched(url: str, allowed: Sequence[str], most: int, until: float) -> bytes:
    """What lies at an address, read no further than just beyond `most` bytes; see `with_fetched`.

    Args:
        until: when it must have come, by `time.monotonic`.
    """
    for _ in range(1 + MOST_REDIRECTS):
        place = _Place.of(url, allowed)
        try:
            data, url = _asked(place, most, until)
        except (OSError, HTTPException, UnicodeError) as error:
            told = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise _late() if time.monotonic() >= until else ValueError(
                f"a file could not be fetched from {place.named}: {' '.join(str(told).split())}") from None
        if not url:
            return data
    raise ValueError(f"an address points on more than {MOST_REDIRECTS} times; send where it leads to")


@dataclass(frozen=True)
class _Place:
    """An address that may be asked: of a file, and of the machine that has it."""

    url: SplitResult
    host: str
    named: str
    allowed: Sequence[str]

    @classmethod
    def of(cls, url: str, allowed: Sequence[str]) -> _Place:
        """The place at a URL; Unsupported where it may not be asked, ValueError for what is no URL."""
        found, host = _split(url)
        if found.scheme not in _SCHEMES:
            raise Unsupported(f"a file at {reprlib.repr(found.scheme)}:", "only http and https are asked", _DATA)
        named = reprlib.repr(host)
        if found.username is not None or found.password is not None:
            raise Unsupported(f"a file at {named} with a user's name", "no credentials are sent", _DATA)
        if not any(_admits(one, host) for one in allowed):
            raise Unsupported(f"a file at {named}", "it is not among the hosts that this server's operator allows",
                              _DATA)
        return cls(found, host, named, allowed)

    @property
    def port(self) -> int:
        """Where the machine listens."""
        return self.url.port or {"http": 80, "https": 443}[self.url.scheme]

    @property
    def target(self) -> str:
        """What is asked for."""
        query = f"?{self.url.query}" if self.url.query else ""
        return quote((self.url.path or "/") + query, safe=_KEPT)

    def addresses(self) -> list[str]:
        """The machine's addresses; Unsupported if one of them is not public and was not listed."""
        known = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        found = [*dict.fromkeys(str(one[4][0]) for one in known)]
        for address in found:
            if not ({self.host, address} & {*self.allowed} or _is_public(ipaddress.ip_address(address.split("%")[0]))):
                raise Unsupported(f"a file at {self.named}", "it is a machine of this server's own network, which "
                                  "its operator has not listed by this name", _DATA)
        return found


def _split(url: str) -> tuple[SplitResult, str]:
    """A URL in its parts, and its host; ValueError if it is none."""
    try:
        found = urlsplit(url)
        host, _ = (found.hostname or "").rstrip("."), found.port
        if host or found.scheme not in _SCHEMES:
            return found, host
    except ValueError:
        pass
    raise ValueError("a file's URL is none; give one such as https://example.org/cat.png")


def _admits(listed: str, host: str) -> bool:
    """Whether an entry of the operator's list has a host: `*` all, `*.example.org` all below."""
    return listed in ("*", host) or (listed.startswith("*.") and host.endswith(listed[1:]))


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address lies in the internet, and, where it stands for an IPv4 address, that one too."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _MAPPED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    return address.is_global and not address.is_multicast


def _asked(place: _Place, most: int, until: float) -> tuple[bytes, str]:
    """What is answered: a file, or where else it is."""
    with _connected(place, until) as connection:
        connection.request("GET", place.target, headers=_ASKED)
        answer = connection.getresponse()
        to = answer.getheader("Location")
        if answer.status in _MOVED and to:
            with suppress(ValueError):
                to = urljoin(place.url.geturl(), to)
            return b"", to
        if answer.status != 200:
            raise ValueError(f"a file is asked for at {place.named}, which answers {answer.status}")
        data = _body(answer, most)
        if time.monotonic() >= until:
            raise _late()
        return data, ""


@contextmanager
def _connected(place: _Place, until: float) -> Iterator[HTTPConnection]:
    """A connection to an address that was checked, cut off when the time is over."""
    with _socket(place, until) as bare:
        secure = place.url.scheme == "https"
        made = _tls().wrap_socket(bare, server_hostname=place.host, do_handshake_on_connect=False) if secure else bare
        clock = threading.Timer(until - time.monotonic(), _cut, [made])
        clock.daemon = True
        clock.start()
        with made:
            try:
                if isinstance(made, ssl.SSLSocket):
                    made.do_handshake()
                connection = (HTTPSConnection if secure else HTTPConnection)(place.host, place.port)
                connection.sock = made
                yield connection
            finally:
                clock.cancel()


def _socket(place: _Place, until: float) -> socket.socket:
    """A socket to the first of the machine's addresses that answers; OSError if none does."""
    failed = OSError("it has no address")
    for address in place.addresses():
        left = until - time.monotonic()
        if left <= 0:
            raise _late()
        try:
            return socket.create_connection((address, place.port), timeout=left)
        except OSError as error:
            failed = error
    raise failed


def _cut(connected: socket.socket) -> None:
    """End a connection under the thread that reads from it, which a limit on each read would not do."""
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _body(answer: HTTPResponse, most: int) -> bytes:
    """The first `most` bytes of an answer's body and some more, whatever its header says of its length."""
    found = bytearray()
    while len(found) <= most and (piece := answer.read1(1 << 16)):
        found += piece
    return bytes(found)


def _late() -> ValueError:
    return ValueError(f"a conversation's pictures and films took more than {SECONDS:g} seconds to fetch, the most "
                      f"that is waited; {_DATA[0].lower()}{_DATA[1:]}")
