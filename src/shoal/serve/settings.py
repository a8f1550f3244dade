"""What an operator decides about a server, checked before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Options of a server.

    Attributes:
        model_name: the name under which clients ask for the model; another one is answered 404.
        method: what decodes where a request names no method; the request's "full" is plain decoding.
        methods: names of the methods that requests may ask for; None for every one that loads nothing.
        api_keys: keys of which a request must carry one; without any, all are welcome.
        default_max_tokens: the limit of a chat answer that names none.
        max_tokens: the largest limit that a request may name.
        max_n: most answers per request, over all its prompts; a search counts as so many as it may have branches.
        max_body: most bytes of a request.
        timeout: seconds after which a request is given up and answered 504; None for never.
        grace: seconds that requests have to finish when the server shuts down.
        log_prompts: whether logs may hold prompts and answers.
        playground: whether there is a page at `/`.
        strict: whether fields without effect are answered 400.
        limits: what numbers of methods a request may set, by `method.knob`, where that is not what the method says.
        hosts: names by which the server may be asked, each with or without a port; none for any.
        keep_alive: seconds that a connection without a request stays open.
        stall: seconds after which a step that does not end counts as stuck, and the server as ill.
        members_folder: a folder of Python code whose modules `guided_members` knows; none where empty.
        cors_origins: origins whose pages may ask, `*` for all; pages of this machine always may.
    """

    model_name: str = "shoal"
    method: Any = "auto"
    methods: frozenset[str] | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    default_max_tokens: int = 1024
    max_tokens: int = 16384
    max_n: int = 16
    max_body: int = 1 << 20
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

    def __post_init__(self) -> None:
        for name in ("default_max_tokens", "max_tokens", "max_n", "max_body"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; it must be more than 0 seconds, or none at all")
        for name in ("grace", "keep_alive"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 0 seconds, and finite")
        if not self.stall > 0:
            raise ValueError(f"stall is {self.stall}; it must be more than 0 seconds")
        if "" in self.api_keys:
            raise ValueError("an API key is empty; give one of at least one character")
