"""Guesses by looking up: what followed the last few tokens when they occurred before, in the prompt or the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.decode.tree import TokenTree
from shoal.draft.per_row import PerRow

if TYPE_CHECKING:
    from shoal.decode.accept import Outcome
    from shoal.decode.row import Row


@dataclass(frozen=True)
class NGrams:
    """Continues the latest earlier occurrence of the longest suffix that has one.

    The idea of prompt lookup decoding. A continuation that runs into the end of the text goes on with what it has
    just guessed, so a short period is continued to any length.

    Attributes:
        longest, shortest: lengths in tokens of the suffixes that are looked up, the longest first.
        length: most tokens to guess.
    """

    longest: int = 4
    shortest: int = 2
    length: int = 10

    def __post_init__(self) -> None:
        if self.shortest < 1:
            raise ValueError(f"min_ngram is {self.shortest}; it must be at least 1 token")
        if self.longest < self.shortest:
            raise ValueError(f"max_ngram is {self.longest}, below min_ngram {self.shortest}; it must be at least that")
        if self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1 token")

    def begin(self, stack: Any, cache: Any) -> NGramDrafter:
        """A drafter that has seen no row yet."""
        return NGramDrafter(self)


class NGramDrafter:
    """See `shoal.decode.recipe.Drafter`."""

    def __init__(self, proposer: NGrams) -> None:
        self._length = proposer.length
        self._indices = PerRow(lambda _: Index(proposer.longest, proposer.shortest))

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """A chain per row; the root alone where nothing matches."""
        return [self._chain(row, min(self._length, limit)) for row, limit in zip(rows, limits, strict=True)]

    def _chain(self, row: Row, length: int) -> TokenTree:
        place = self._indices[row].find(row.tokens)
        guesses = [] if place is None else continuation(row.tokens, place, length)
        return TokenTree.chain([row.tokens[-1], *guesses])

    def observe(self, row: Row, tree: TokenTree, outcome: Outcome) -> None:
        """Nothing to learn: the row's own tokens are read when they are there."""


class Index:
    """Where each n-gram of a growing text last ended; costs the same per token however long the text is."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """The place after the latest earlier occurrence of the longest known suffix of `tokens`.

        Args:
            tokens: the text: what it was in the call before, and more.
        """
        self._extend(tokens)
        for size in self._sizes:
            place = self._after.get(tuple(tokens[-size:]))
            if place is not None:
                return place
        return None

    def _extend(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that something follows."""
        for end in range(self._read + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._read = max(self._read, len(tokens) - 1)


def continuation(tokens: Sequence[int], place: int, length: int) -> list[int]:
    """`length` tokens from `place` on, reading on in themselves beyond the end."""
    found = list(tokens[place : place + length])
    period = len(tokens) - place
    while len(found) < length:
        found.append(found[len(found) - period])
    return found
