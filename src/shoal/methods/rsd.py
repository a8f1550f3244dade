"""Recursive speculative decoding: a smaller model draws a tree without replacement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.draft.shape import Beam, Branching
from shoal.methods._drafting import RuleName
from shoal.methods._second_model import SecondModelMethod
from shoal.types import ModelInfo


@dataclass(frozen=True, repr=False)
class RSD(SecondModelMethod):
    """A smaller model draws a tree of guesses without replacement; the target keeps a path by recursive rejection.

    With `beam` the tree is a stochastic beam search (the paper's RSD-S), with `branching` it has a fixed number of
    children per level (RSD-C). Greedy rows get the same trees without noise, and exact matches.

    Attributes:
        beam: paths of the beam.
        length: tokens of each path.
        branching: instead of a beam, children per node at each level, such as 3,2,1; then the other two do not count.
        rule: as for other methods that draft.
    """

    name: ClassVar[str] = "rsd"
    paper: ClassVar[str] = "arXiv 2402.14160"

    beam: int = 3
    length: int = 4
    branching: tuple[int, ...] | None = None
    rule: RuleName = field(default="rejection", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shape()

    def recipe(self, info: ModelInfo) -> Recipe:
        """The draft model's trees, confirmed by the target."""
        return self.verified(self.proposing(info, self._shape()), info)

    def _shape(self) -> Beam | Branching:
        return Beam(self.beam, self.length) if self.branching is None else Branching(self.branching)
