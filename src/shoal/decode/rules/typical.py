"""Typical acceptance: keeps guesses that the target finds plausible enough. Lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from shoal.decode.rules.accept import Match, Outcome, OwnNumbers, Target
from shoal.decode.signals import entropy_of
from shoal.decode.tree import TokenTree

_MATCH = Match()


@dataclass(frozen=True, slots=True)
class Typical(OwnNumbers):
    """A guess x is kept if p(x) > min(epsilon, sqrt(epsilon) * exp(-H(p))), p the target's, H its entropy.

    The longest path of such guesses is taken, the first in drawing order among equals, then the target's own token.
    The formula is arXiv 2401.10774, section 3.3.1, with its delta at the suggested sqrt(epsilon); the threshold is
    that of truncation sampling (arXiv 2210.15191). The output follows the draft where the target is unsure, so it
    has no distribution of its own. Greedy rows are matched exactly.

    Attributes:
        epsilon: in (0, 1]; the larger, the fewer guesses are kept.
    """

    epsilon: float = 0.09
    exact: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}; it must be in (0, 1], 0.09 in the paper")

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The longest path of plausible guesses, and the target's own token after it."""
        if target.greedy:
            return _MATCH.walk(tree, target)
        kept = [0]
        for node in range(1, len(tree)):
            if tree.parents[node] in kept and self._plausible(tree, target, node):
                kept.append(node)
        last = max(kept, key=lambda node: (tree.depths[node], -node))
        return Outcome(tree.path(last), target.choice(last))

    @override
    def purpose(self, rank: int, place: int | None) -> str:
        """In a tree the number that an exact match would use: guesses then come closer to the target's draws."""
        return OwnNumbers.purpose(self, rank, place) if place is None else _MATCH.purpose(rank, place)

    def _plausible(self, tree: TokenTree, target: Target, node: int) -> bool:
        probs = target.probs(tree.parents[node])
        threshold = min(self.epsilon, math.sqrt(self.epsilon) * math.exp(-float(entropy_of(probs))))
        return float(probs[tree.tokens[node]]) > threshold
