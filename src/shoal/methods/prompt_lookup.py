"""Prompt lookup: guesses are copied from what the text already holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Proposer
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.limits import Guesses, Suffix
from shoal.speculative.draft import check_length
from shoal.speculative.per_sequence import TextDrafter
from shoal.speculative.suffix_matcher import continuation
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState


@dataclass(frozen=True)
class PromptLookup(DraftingMethod, Proposer):
    """What followed the last few tokens before, in source, prompt or answer, is guessed to follow again.

    The guess is what came after the latest earlier occurrence of the longest suffix that has one. A guess that runs
    into the end of the text goes on with what it has just guessed, so a short period is continued to any length. It
    costs next to nothing, and pays where the answer quotes or repeats. The method is its own proposer.

    Attributes:
        max_ngram: tokens of the longest suffix that is looked up.
        min_ngram: tokens of the shortest one.
        length: most tokens to guess at a time.
    """

    name: ClassVar[str] = "prompt_lookup"
    paper: ClassVar[str] = "arXiv 2304.04487"

    max_ngram: Suffix = 4
    min_ngram: Suffix = 2
    length: Guesses = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_ngram < 1:
            raise ValueError(f"min_ngram is {self.min_ngram}; it must be at least 1 token")
        if self.max_ngram < self.min_ngram:
            raise ValueError(
                f"max_ngram is {self.max_ngram}, below min_ngram {self.min_ngram}; it must be at least that"
            )
        check_length(self.length)

    def recipe(self, info: ModelInfo) -> Recipe:
        """N-grams of the sequence's own text, confirmed by the target."""
        return self.verified(self, info)

    def begin(self, runner: Any, cache: Any) -> TextDrafter[Index]:
        """A drafter that has seen no sequence yet."""
        return TextDrafter(lambda _: Index(self.max_ngram, self.min_ngram), self._chain)

    def _chain(self, seq: SequenceState, index: Index, limit: int) -> TokenTree:
        """The last token alone where nothing matches."""
        text = seq.quotable
        place = index.find(text)
        guesses = [] if place is None else continuation(text, place, min(self.length, limit))
        return TokenTree.chain([seq.tokens[-1], *guesses])


class Index:
    """Where each n-gram of a growing text last ended; costs the same per token however long the text is."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """The place after the latest earlier occurrence of the longest known suffix of `tokens`, a growing text."""
        self._extend(tokens)
        places = (self._after.get(tuple(tokens[-size:])) for size in self._sizes(len(tokens)))
        return next((place for place in places if place is not None), None)

    def _extend(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that something follows."""
        for end in range(self._read + 1, len(tokens)):
            for size in self._sizes(end):
                self._after[tuple(tokens[end - size : end])] = end
        self._read = max(self._read, len(tokens) - 1)

    def _sizes(self, length: int) -> range:
        """Lengths of n-grams, the longest first, that a text of `length` tokens can have."""
        return range(min(self._longest, length), self._shortest - 1, -1)
