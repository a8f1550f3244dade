"""How a tree of guesses grows, level after level and for all sequences at once, and which guesses it keeps.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from shoal.decode.tree import TokenTree


class Growth:
    """A tree under way, its nodes in breadth-first order; the root is the sequence's last token.

    Attributes:
        tokens, parents, draft_probs: as in `TokenTree`.
        paths: for each node the guesses on the path to it, itself included.
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self.draft_probs: list[Any] = [None]
        self.paths: list[tuple[int, ...]] = [()]

    def add(self, token: int, parent: int, probs: Any = None) -> int:
        """A guess after node `parent`, drawn from `probs` [V] (None where it was not drawn); its node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.draft_probs.append(probs)
        self.paths.append((*self.paths[parent], token))
        return len(self.tokens) - 1

    def tree(self) -> TokenTree:
        """What has grown."""
        drawn = any(probs is not None for probs in self.draft_probs)
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.draft_probs) if drawn else None)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A node whose children are to be drawn.

    Attributes:
        node: its index in the tree.
        log: log-probability of the path to it, in nats.
        value: that, perturbed by Gumbel noise; equal to it where nothing is drawn.
    """

    node: int
    log: float = 0.0
    value: float = 0.0


Child = tuple[float, float]
"""`log` and `value` of a child that is kept."""
Noise = Callable[[int, int], "float | None"]
"""Uniform numbers in (0, 1) by leaf (its place in the level) and rank of the child; None where nothing is drawn."""


class TreeShape(Protocol):
    """How a tree grows."""

    @property
    def length(self) -> int:
        """Most guesses one after another."""

    def width(self, level: int) -> int:
        """Most children that a node at distance `level` from the root may get."""

    def keep(self, leaves: Sequence[Leaf], logs: Sequence[Sequence[float]], noise: Noise) -> list[list[Child]]:
        """Which of the drawn children stay: for each leaf the first few, in the order of drawing.

        Args:
            leaves: the nodes of one level.
            logs: per leaf the log-probabilities of its children given the leaf.
        """


@dataclass(frozen=True)
class Branching:
    """`counts` children of each node of level 0, 1, ...; RSD-C of arXiv 2402.14160. Ones alone make a chain."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"branching is {self.counts}; it must hold at least one level, each of at least 1 child")

    @property
    def length(self) -> int:
        """Levels."""
        return len(self.counts)

    def width(self, level: int) -> int:
        """Children of a node of that level."""
        return self.counts[level]

    def keep(self, leaves: Sequence[Leaf], logs: Sequence[Sequence[float]], noise: Noise) -> list[list[Child]]:
        """All of them."""
        return [[(leaf.log + log, 0.0) for log in own] for leaf, own in zip(leaves, logs, strict=True)]


@dataclass(frozen=True)
class DynamicTree:
    """The likeliest paths of each level are gone on with: the dynamic tree of EAGLE-2 (arXiv 2406.16858, section 4).

    What stays depends on what was guessed, so it is no sample of the drafter's law.

    Attributes:
        length: levels.
        paths: nodes of a level that stay, and most children of each.
    """

    length: int
    paths: int

    def __post_init__(self) -> None:
        if min(self.length, self.paths) < 1:
            raise ValueError(f"a tree of {self.length} levels and {self.paths} paths; both must be at least 1")

    def width(self, level: int) -> int:
        """As many children as there may be paths."""
        return self.paths

    def keep(self, leaves: Sequence[Leaf], logs: Sequence[Sequence[float]], noise: Noise) -> list[list[Child]]:
        """The first children of each leaf, as long as they are among the likeliest of the level."""
        found = [[leaf.log + log for log in own] for leaf, own in zip(leaves, logs, strict=True)]
        ranked = sorted((log for own in found for log in own), reverse=True)
        least = ranked[self.paths - 1] if len(ranked) > self.paths else -math.inf
        return [[(log, log) for log in takewhile(lambda log: log >= least, own)] for own in found]
