"""Policies of a canvas of masks: which guesses stay in a step, where a block ends, when all masks are filled at once.

Plain Python over numbers; imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Remasking = Literal["confidence", "margin", "entropy", "random"]
Reuse = Literal["none", "prefix", "dual"]
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Guess:
    """What a forward says of one mask.

    Attributes:
        place: of the mask, counted from the answer's beginning.
        token: the word that would stand there: the likeliest, or a draw.
        confidence: its probability before temperature and truncation.
        score: by which guesses are ranked.
        gap: how far the largest logit is above the second.
    """

    place: int
    token: int
    confidence: float
    score: float
    gap: float


class Commit(ABC):
    """Says which guesses in a block stay. Immutable."""

    @abstractmethod
    def choose(self, guesses: Sequence[Guess], left: int) -> list[Guess]:
        """At least one of them, where there are any.

        Args:
            guesses: for the masks of the block, from left to right.
            left: steps that the block still has, this one included.
        """


@dataclass(frozen=True)
class Scheduled(Commit):
    """As many a step as it takes to be ready in time, those of the best score (LLaDA, arXiv 2502.09992, section 2.4).

    Attributes:
        steps: of the whole answer; None for one a word.
    """

    steps: int | None = None

    def choose(self, guesses: Sequence[Guess], left: int) -> list[Guess]:
        """See `Commit`."""
        return _ranked(guesses)[: math.ceil(len(guesses) / left)]

    def share(self, first: int, last: int, length: int) -> int:
        """The steps of words first..last-1 of an answer of that length."""
        steps = length if self.steps is None else self.steps
        return max(1, last * steps // length - first * steps // length)


@dataclass(frozen=True)
class Confident(Commit):
    """All that are sure enough, and the surest in any case (Fast-dLLM, arXiv 2505.22618, section 3.3).

    Attributes:
        threshold: the least probability; None where `factor` says it.
        factor: f, by which the n surest stay where (n + 1)(1 - p) <= f for the probability p of the n-th.
    """

    threshold: float | None = None
    factor: float | None = None

    def choose(self, guesses: Sequence[Guess], left: int) -> list[Guess]:
        """See `Commit`."""
        ranked = sorted(guesses, key=lambda guess: -guess.confidence)
        sure = 1
        while sure < len(ranked) and ranked[sure].confidence >= self._least(sure + 1):
            sure += 1
        return ranked[:sure]

    def _least(self, count: int) -> float:
        """The probability that the last of so many must have."""
        if self.factor is not None:
            return 1 - self.factor / (count + 1)
        assert self.threshold is not None
        return self.threshold


def _ranked(guesses: Sequence[Guess]) -> list[Guess]:
    return sorted(guesses, key=lambda guess: -guess.score)


@dataclass(frozen=True)
class FixedBlocks:
    """Says where a block ends: so many words on, at any rate not beyond the answer. Immutable.

    Attributes:
        size: words of a block; None for 32, or a shorter answer.
    """

    size: int | None = None

    def ahead(self, length: int, left: int) -> int:
        """How many words from the block's beginning the choice depends on, of `left` in an answer of `length`."""
        return min(self.size or BLOCK, left)

    def choose(self, guesses: Sequence[Guess], length: int, left: int) -> int:
        """How many words the block has.

        Args:
            guesses: for masks from the block's beginning on, at least as many as `ahead` says.
            length: of the answer.
            left: words from the block's beginning to the answer's end.
        """
        return min(self.size or BLOCK, left)


class EarlyFill(ABC):
    """Says when all masks are filled at once. Immutable."""

    @abstractmethod
    def over(self, guesses: Sequence[Guess], progress: float) -> bool:
        """Whether nothing is left to wait for.

        Args:
            guesses: for all masks of the answer.
            progress: steps done before this one, as a share of all.
        """
