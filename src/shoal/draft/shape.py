"""Which guesses a token tree keeps, level by level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


class Shape(Protocol):
    """How a tree grows."""

    @property
    def length(self) -> int:
        """Most guesses one after another."""
        ...

    def width(self, level: int) -> int:
        """Most children that a node at distance `level` from the root may get."""
        ...

    def keep(self, leaves: Sequence[Leaf], logs: Sequence[Sequence[float]], noise: Noise) -> list[list[Child]]:
        """Which of the drawn children stay: for each leaf the first few, in the order of drawing.

        Args:
            leaves: the nodes of one level.
            logs: per leaf the log-probabilities of its children given the leaf.
            noise: uniform numbers for the perturbation, or None for a row without draws.
        """
        ...


class Noise(Protocol):
    """Uniform numbers in (0, 1) by leaf (its place in the level) and rank of the child; None where nothing is drawn."""

    def __call__(self, leaf: int, rank: int) -> float | None:
        """The number."""
        ...


@dataclass(frozen=True)
class Branching:
    """A fixed number of children at each level; RSD-C of arXiv 2402.14160. Ones alone make a chain.

    Attributes:
        counts: children of each node of level 0, 1, ...
    """

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
class Beam:
    """Stochastic beam search: the `size` paths of highest perturbed log-probability; RSD-S of arXiv 2402.14160.

    A row's paths at each level are a sample without replacement from the drafter's law of whole paths (arXiv
    1903.06059). Children come in descending perturbed value: the first inherits its parent's, the next ones are
    Gumbel maxima of the probability that is left, truncated at the value before. So no noise of vocabulary size is
    needed, and what is drawn equals the top of a full perturbation in law. A beam of a greedy row is a plain one.

    Attributes:
        size: paths.
        length: tokens of each.
    """

    size: int
    length: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.length < 1:
            raise ValueError(f"a beam of {self.size} paths of {self.length} tokens; both must be at least 1")

    def width(self, level: int) -> int:
        """As many children as there are paths, whatever the level."""
        return self.size

    def keep(self, leaves: Sequence[Leaf], logs: Sequence[Sequence[float]], noise: Noise) -> list[list[Child]]:
        """Those whose perturbed value is among the highest of the level."""
        grown = [_children(leaf, own, at, noise) for at, (leaf, own) in enumerate(zip(leaves, logs, strict=True))]
        values = sorted((value for children in grown for _, value in children), reverse=True)
        if len(values) <= self.size:
            return grown
        # Values fall within a family, so a family keeps a beginning of itself; ties go to the earlier leaf.
        room, least = self.size, values[self.size - 1]
        above = [sum(value > least for _, value in children) for children in grown]
        room -= sum(above)
        kept = []
        for children, count in zip(grown, above, strict=True):
            tied = min(room, sum(value == least for _, value in children))
            room -= tied
            kept.append(children[: count + tied])
        return kept


def _children(leaf: Leaf, logs: Sequence[float], at: int, noise: Noise) -> list[Child]:
    children: list[Child] = []
    left, value = 1.0, leaf.value
    for rank, log in enumerate(logs):
        u = noise(at, rank)
        if u is None:
            value = leaf.log + log
        elif rank > 0:
            value = truncated_gumbel(leaf.log + math.log(max(left, 1e-300)), value, u)
        children.append((leaf.log + log, value))
        left -= math.exp(log)
    return children


def truncated_gumbel(location: float, bound: float, u: float) -> float:
    """The value at `u` in [0, 1) of a Gumbel variable with that location that is known to be at most `bound`."""
    tail = -math.log(u) if u > 0 else math.inf
    gap = location - bound
    if gap > 700:  # the bound is all that matters
        return bound - math.log1p(tail * math.exp(-gap)) if tail < math.inf else -math.inf
    return location - math.log(math.exp(gap) + tail) if tail < math.inf else -math.inf
