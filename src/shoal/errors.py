"""The one exception of Shoal's own: something that was asked for and cannot be done."""

from __future__ import annotations


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
