"""The model drafts for itself with some of its layers, on its own weights and its own KV. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.depth.plan import DepthPlan

if TYPE_CHECKING:
    from shoal.draft.forwards import ShallowDrafter
    from shoal.model.kv import KVCache
    from shoal.model.stack import Stack

Widths = tuple[tuple[float, int], ...]
"""Candidates per place: (confidence, width) pairs, ascending; the first confidence that is not passed counts."""


@dataclass(frozen=True)
class Shallow:
    """Drafts chains with the layers of a depth plan, whose schedule restarts with every draft.

    Attributes:
        plan: layers to draft with: node j of a draft runs those of step j + 1.
        length: most guesses at a time.
        stop: confidence below which a guess is the last one, in [0, 1]; 0 never stops early.
        widths: candidates per place, by confidence; without any, one.
    """

    plan: DepthPlan
    length: int
    stop: float = 0.0
    widths: Widths = ()

    def __post_init__(self) -> None:
        check_length(self.length)
        check_share("stop", self.stop)

    def begin(self, stack: Stack, cache: KVCache) -> ShallowDrafter:
        """A drafter on the target's own stack and cache."""
        from shoal.draft.forwards import ShallowDrafter

        return ShallowDrafter(self, stack, cache)


def check_length(length: int) -> None:
    """Refuse a draft without guesses."""
    if length < 1:
        raise ValueError(f"length is {length}; it must be at least 1 token. Plain decoding is method 'full'")


def check_share(name: str, value: float) -> None:
    """Refuse what is no share."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must be in [0, 1]")
