"""Drafts that leave sublayers out: with an adaptive threshold, or searched for on the fly. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.depth.plan import DepthPlan
from shoal.draft.shallow import Widths, check_length, check_share

if TYPE_CHECKING:
    from shoal.draft.adaptive import AdaptiveDrafter
    from shoal.draft.swift import SwiftDrafter
    from shoal.model.kv import KVCache
    from shoal.model.stack import Stack


@dataclass(frozen=True)
class Adaptive:
    """A fixed plan drafts; where a draft stops follows the acceptance.

    Attributes:
        plan: layers to draft with.
        length: most guesses at a time.
        greedy_stop, sampled_stop: the confidence at which drafts stop at first.
        accepted: share of the guesses that is to be accepted.
    """

    plan: DepthPlan
    length: int = 12
    greedy_stop: float = 0.8
    sampled_stop: float = 0.5
    accepted: float = 0.9
    stop: float = 0.0
    widths: Widths = ()

    def __post_init__(self) -> None:
        check_length(self.length)
        for name in ("greedy_stop", "sampled_stop", "accepted"):
            check_share(name, getattr(self, name))

    def begin(self, stack: Stack, cache: KVCache) -> AdaptiveDrafter:
        """A drafter on the target's own stack and cache."""
        from shoal.draft.adaptive import AdaptiveDrafter

        return AdaptiveDrafter(self, stack, cache)


@dataclass(frozen=True)
class Searched:
    """Some sublayers are left out, which ones is found out on the row's own text.

    Attributes:
        skipped: number of sublayers left out.
        length: most guesses at a time.
        stop: confidence below which a guess is the last one.
        widths: candidates per place, by confidence.
        nodes: most nodes of a tree.
        window: tokens on which a set is judged; the search begins with half of them.
        rounds: most sets that are tried per row.
        patience: sets without improvement after which the search ends.
        enough: share of the tokens predicted at which it ends.
        bayes_every: every so many sets, one is a Bayesian guess; 0 for none.
    """

    skipped: int
    length: int = 8
    stop: float = 0.7
    widths: Widths = ()
    nodes: int = 24
    window: int = 32
    rounds: int = 24
    patience: int = 12
    enough: float = 0.95
    bayes_every: int = 8

    def __post_init__(self) -> None:
        check_length(self.length)
        check_share("stop", self.stop)
        check_share("enough", self.enough)
        for name, least in (
            ("nodes", self.length + 1),
            ("window", 2),
            ("rounds", 0),
            ("patience", 1),
            ("bayes_every", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    def begin(self, stack: Stack, cache: KVCache) -> SwiftDrafter:
        """A drafter on the target's own stack and cache."""
        from shoal.draft.swift import SwiftDrafter

        return SwiftDrafter(self, stack, cache)
