"""What Shoal says when it is asked for something that cannot be done."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Unsupported(ValueError):
    """A request that Shoal understands but cannot honour.

    Args:
        what: the thing that was asked for, with its value.
        why: the reason it cannot be done.
        remedy: what the caller can do instead.
    """

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"{what}: {why}. {remedy}")
        self.what, self.why, self.remedy = what, why, remedy


class OutOfMemory(Unsupported):
    """A request or a model that is too large for the memory there is; smaller ones go on working."""


class QueueFull(RuntimeError):
    """Too much is waiting already; the same request may be taken later."""


class Interrupted(RuntimeError):
    """Work under way was lost through no fault of the request; the same request may be made again."""


class Closed(RuntimeError):
    """Whoever was asked takes no more requests."""


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that nobody knows: it names the nearest known one and lists them all."""
    choices = sorted(known)
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(choices) or 'none'}")
