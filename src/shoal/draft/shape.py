"""Which guesses a token tree keeps, level by level."""

from __future__ import annotations

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


class TreeShape(Protocol):
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
