"""Recursive speculative decoding: a smaller model draws a tree without replacement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import RuleName, SecondModelMethod
from shoal.methods.common.limits import Guesses, TreeWidths
from shoal.speculative.growth import Branching, Child, Leaf, Noise
from shoal.types import ModelInfo


@dataclass(frozen=True, repr=False)
class RSD(SecondModelMethod):
    """A smaller model draws a tree of guesses without replacement; the target keeps a path by recursive rejection.

    With `beam` the tree is a stochastic beam search (the paper's RSD-S), with `branching` it has a fixed number of
    children per level (RSD-C). Greedy rows get the same trees without noise, and exact matches.

    Attributes:
        beam: paths of the beam.
        length: tokens of each path.
        branching: instead of a beam, children per node at each level, such as 3,2,1; the other two are then ignored.
        rule: as for other drafting methods.
    """

    name: ClassVar[str] = "rsd"
    paper: ClassVar[str] = "arXiv 2402.14160"

    beam: Guesses = 3
    length: Guesses = 4
    branching: TreeWidths | None = None
    rule: RuleName = field(default="rejection", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shape()

    def recipe(self, info: ModelInfo) -> Recipe:
        """The draft model's trees, verified by the target."""
        return self.verified(self.proposing(info, self._shape()), info)

    def _shape(self) -> Beam | Branching:
        return Beam(self.beam, self.length) if self.branching is None else Branching(self.branching)


@dataclass(frozen=True)
class Beam:
    """Stochastic beam search: the `size` paths of highest perturbed log-probability; the paper's RSD-S.

    A row's paths at each level are a sample without replacement from the drafter's distribution of whole paths (arXiv
    1903.06059). Children come in descending perturbed value: the first inherits its parent's, the next ones are Gumbel
    maxima of the remaining probability, truncated at the previous value. So no noise of vocabulary size is needed, and
    the sample is distributed like the top of a full perturbation. The beam of a greedy row is a plain one.

    Attributes:
        size: number of paths.
        length: tokens of each path.
    """

    size: int
    length: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.length < 1:
            raise ValueError(f"a beam of {self.size} paths of {self.length} tokens; both must be at least 1")

    def width(self, level: int) -> int:
        """As many children as there are paths, on every level."""
        return self.size

    def keep(self, leaves: Sequence[Leaf], logs: Sequence[Sequence[float]], noise: Noise) -> list[list[Child]]:
        """The children whose perturbed value is among the highest of the level."""
        grown = [_children(leaf, own, at, noise) for at, (leaf, own) in enumerate(zip(leaves, logs, strict=True))]
        values = sorted((value for children in grown for _, value in children), reverse=True)
        if len(values) <= self.size:
            return grown
        # Values fall within a family, so each family keeps a prefix of itself; the earlier leaf wins ties.
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
    """The value at `u` in [0, 1) of a Gumbel variable with that location, given that it is at most `bound`."""
    tail = -math.log(u) if u > 0 else math.inf
    gap = location - bound
    if gap > 700:  # only the bound matters
        return bound - math.log1p(tail * math.exp(-gap)) if tail < math.inf else -math.inf
    return location - math.log(math.exp(gap) + tail) if tail < math.inf else -math.inf
