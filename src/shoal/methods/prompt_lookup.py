"""Prompt lookup: guesses are copied from what the text already holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.draft.ngram import NGrams
from shoal.methods._drafting import DraftingMethod
from shoal.types import ModelInfo


@dataclass(frozen=True)
class PromptLookup(DraftingMethod):
    """What followed the last few tokens before, in the prompt or the answer, is guessed to follow again.

    Costs next to nothing and needs no second model; pays where the answer quotes or repeats. Taken is the latest
    occurrence of the longest suffix that occurred before.

    Attributes:
        max_ngram: tokens of the longest suffix that is looked up.
        min_ngram: tokens of the shortest one.
        length: most tokens to guess at a time.
    """

    name: ClassVar[str] = "prompt_lookup"
    paper: ClassVar[str] = "arXiv 2304.04487"

    max_ngram: int = 4
    min_ngram: int = 2
    length: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._proposer()

    def recipe(self, info: ModelInfo) -> Recipe:
        """N-grams of the row's own text, confirmed by the target."""
        return self.verified(self._proposer(), info)

    def _proposer(self) -> NGrams:
        return NGrams(self.max_ngram, self.min_ngram, self.length)
