"""The operator's settings of a server, checked before it starts."""

from __future__ import annotations

import ipaddress
import math
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.serve.errors import SPEECH_ROUTE
from shoal.serve.stored import StoredResponses

if TYPE_CHECKING:
    from shoal.integrations.mcp_servers import McpServers

_NAMES = ("localhost", "127.0.0.1", "[::1]")
_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/api/chat",
          "/api/generate", "/tokenize")
"""Routes whose messages may hold pictures, films and sounds."""


@dataclass(frozen=True)
class Settings:
    """Options of a server.

    Attributes:
        model_name: the model's name for clients; a request for another one is answered 404.
        adapters: names of adapters, each of which is a model's name of its own.
        method: the method for requests that name none; a request may name "full" for plain decoding.
        methods: names of the methods that requests may ask for; None for every one that loads nothing.
        api_keys: keys of which a request needs one; if there are none, requests need no key.
        default_max_tokens: the limit of a chat answer if the request names none.
        max_tokens: the largest limit that a request may name.
        max_n: most answers per request, over all its prompts; a search counts once per possible branch.
        max_body: most bytes of a request.
        max_audio: most bytes of one with sound.
        max_pictures: most bytes of a chat where models see, or hear; 0 where none does.
        max_audio_seconds: most seconds of sound.
        allowed_media_domains: hosts from which pictures and films are fetched, as `media_domain` reads them.
        timeout: seconds after which a request is answered 504; None for no limit.
        grace: seconds that requests have to finish when the server shuts down.
        log_prompts: whether logs may contain prompts and answers.
        playground: whether to serve a page at `/`.
        strict: whether to answer 400 to fields without effect.
        limits: largest values that a request may give to methods' options, by `method.option`, in place of the
            method's own limits.
        hosts: host names that requests may use, each with or without a port; empty for any.
        keep_alive: seconds that a connection without a request stays open.
        stall: seconds after which an unfinished step counts as stuck, and the server as unhealthy.
        members_folder: folder of Python code whose modules `guided_members` knows; empty for none.
        tools: the MCP servers whose tools the page may call; None for none. The application closes them.
        responses: those that `/v1/responses` stores.
        cors_origins: origins whose pages may send requests, `*` for all; pages of this machine always may.
    """

    model_name: str = "shoal"
    adapters: tuple[str, ...] = ()
    method: Any = "auto"
    methods: frozenset[str] | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    default_max_tokens: int = 1024
    max_tokens: int = 16384
    max_n: int = 16
    max_body: int = 1 << 20
    max_audio: int = 25 << 20
    max_audio_seconds: float = 4 * 3600.0
    max_pictures: int = 0
    allowed_media_domains: tuple[str, ...] = ()
    timeout: float | None = 600.0
    grace: float = 30.0
    log_prompts: bool = False
    playground: bool = True
    strict: bool = False
    cors_origins: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    keep_alive: float = 75.0
    stall: float = 30.0
    members_folder: str = ""
    tools: McpServers | None = field(default=None, repr=False)
    responses: StoredResponses = field(default_factory=StoredResponses, repr=False, compare=False)

    def limit_of(self, path: str) -> int:
        """Most bytes of a request on a path."""
        more = self.max_audio if path.startswith(SPEECH_ROUTE) else self.max_pictures if path in _CHATS else 0
        return max(self.max_body, more)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model answers, its own first."""
        return (self.model_name, *self.adapters)

    def adapter_of(self, name: str) -> str:
        """The adapter that a model's name stands for; "" for none."""
        return name if name in self.adapters else ""

    def __post_init__(self) -> None:
        for name in ("default_max_tokens", "max_tokens", "max_n", "max_body", "max_audio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_pictures < 0:
            raise ValueError(f"max_pictures is {self.max_pictures}; it must be at least 0")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; it must be more than 0 seconds, or none at all")
        for name in ("grace", "keep_alive"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 0 seconds, and finite")
        if not self.max_audio_seconds > 0:
            raise ValueError(f"max_audio_seconds is {self.max_audio_seconds}; it must be more than 0 seconds")
        if not self.stall > 0:
            raise ValueError(f"stall is {self.stall}; it must be more than 0 seconds")
        if "" in self.api_keys:
            raise ValueError("an API key is empty; give one of at least one character")


def hosts_of(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """The host names that requests to a server listening on `host` may use; empty for any.

    On a loopback address they are `more` and the names of this machine. Elsewhere the machine's public names are
    unknown, so any name is allowed unless `more` has some. `*` in `more` allows any.
    """
    given, own = tuple(name.lower().rstrip(".") for name in more), is_loopback(host)
    if "*" in given or not (given or own):
        return ()
    named = (f"[{host}]" if ":" in host else host.lower(),) if own else ()
    return tuple(dict.fromkeys((*_NAMES, *named, *given)))


def media_domain(word: str) -> str:
    """A host from which pictures may be fetched: a name, an address, `*.example.org` for names below, or `*` for all.

    A name or address that is itself listed may lie in the server's own network.

    Raises:
        ValueError: it is none, such as a URL, or a host with a port.
    """
    name = word.strip().lower().rstrip(".")
    with suppress(ValueError):
        return str(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
    if name != "*" and not re.fullmatch(r"[^\s/:@*?#\[\]]+", name.removeprefix("*.")):
        raise ValueError(f"{word!r} is no host whose pictures may be fetched; give one without a scheme or a port, "
                         "such as upload.wikimedia.org, *.example.org or *")
    return name


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address; False for a name that does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)
    except (OSError, ValueError, UnicodeError):
        return False
