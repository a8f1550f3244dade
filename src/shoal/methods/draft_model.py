"""Speculative decoding: a smaller model guesses, the target confirms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import SecondModelMethod
from shoal.methods.common.limits import Guesses, TreeWidths
from shoal.speculative.draft import check_length
from shoal.speculative.growth import Branching
from shoal.types import ModelInfo


@dataclass(frozen=True, repr=False)
class DraftModel(SecondModelMethod):
    """A smaller model guesses a few tokens ahead and the target confirms them in one forward.

    The draft model has a KV cache of its own, in which accepted guesses stay. Under the rule "match", sampled guesses
    are drawn with the uniform numbers that the target will use, so that equal distributions give equal draws. Under
    "rejection" they are drawn with numbers of their own (Algorithm 1 of the paper). A model that was trained to guess
    in parallel (PARD, arXiv 2504.18583) makes all guesses in one forward.

    Attributes:
        length: tokens to guess at a time.
        branching: instead of a chain, children per node at each level, such as 3,2,1; then `length` does not count.
    """

    name: ClassVar[str] = "draft_model"
    paper: ClassVar[str] = "arXiv 2211.17192"

    length: Guesses = 4
    branching: TreeWidths | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        self._shape()

    def recipe(self, info: ModelInfo) -> Recipe:
        """The draft model's guesses, confirmed by the target."""
        return self.verified(self.proposing(info, self._shape()), info)

    def _shape(self) -> Branching:
        return Branching((1,) * self.length if self.branching is None else self.branching)
