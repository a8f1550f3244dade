"""Policies of a canvas of masks: which guesses are kept in a step, where a block ends, when all masks are filled.

Plain Python over numbers; imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

if TYPE_CHECKING:
    from shoal.types import MaskedModel
    from shoal_lab.loops.grammar import CanvasGrammar

Remasking = Literal["confidence", "margin", "entropy", "random"]
Reuse = Literal["none", "prefix", "dual"]
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Guess:
    """A forward's guess for one mask.

    Attributes:
        place: the mask's place, from the answer's beginning.
        token: the guessed token: the argmax, or a sample.
        confidence: its probability before temperature and truncation.
        score: ranks guesses.
        gap: difference between the largest logit and the second.
    """

    place: int
    token: int
    confidence: float
    score: float
    gap: float


class Commit(ABC):
    """Chooses the guesses in a block to keep. Immutable."""

    @abstractmethod
    def choose(self, guesses: Sequence[Guess], left: int) -> list[Guess]:
        """The guesses to keep; at least one, if there are any.

        Args:
            guesses: for the masks of the block, from left to right.
            left: remaining steps of the block, this one included.
        """


@dataclass(frozen=True)
class Scheduled(Commit):
    """As many per step as needed to finish in time, with the best scores (LLaDA, arXiv 2502.09992, section 2.4).

    Attributes:
        steps: steps of the whole answer; None for one per token.
    """

    steps: int | None = None

    @override
    def choose(self, guesses: Sequence[Guess], left: int) -> list[Guess]:
        return _ranked(guesses)[: math.ceil(len(guesses) / left)]

    def share(self, first: int, last: int, length: int) -> int:
        """Steps for tokens first..last-1 of an answer of that length."""
        steps = length if self.steps is None else self.steps
        return max(1, last * steps // length - first * steps // length)


@dataclass(frozen=True)
class Confident(Commit):
    """All that are sure enough, and always the surest (Fast-dLLM, arXiv 2505.22618, section 3.3).

    Attributes:
        threshold: least probability; None to use `factor`.
        factor: f: the n surest are kept if (n + 1)(1 - p) <= f for the probability p of the n-th.
    """

    threshold: float | None = None
    factor: float | None = None

    @override
    def choose(self, guesses: Sequence[Guess], left: int) -> list[Guess]:
        ranked = sorted(guesses, key=lambda guess: -guess.confidence)
        sure = 1
        while sure < len(ranked) and ranked[sure].confidence >= self._least(sure + 1):
            sure += 1
        return ranked[:sure]

    def _least(self, count: int) -> float:
        """The probability that the last of `count` must have."""
        if self.factor is not None:
            return 1 - self.factor / (count + 1)
        assert self.threshold is not None
        return self.threshold


def _ranked(guesses: Sequence[Guess]) -> list[Guess]:
    return sorted(guesses, key=lambda guess: -guess.score)


@dataclass(frozen=True)
class FixedBlocks:
    """Decides where a block ends: after a fixed number of tokens, at most at the answer's end. Immutable.

    Attributes:
        size: tokens of a block; None for 32, or a shorter answer.
    """

    size: int | None = None

    def ahead(self, length: int, left: int) -> int:
        """Tokens from the block's beginning on which the choice depends, of `left` in an answer of `length`."""
        return min(self.size or BLOCK, left)

    def choose(self, guesses: Sequence[Guess], length: int, left: int) -> int:
        """Number of tokens of the block.

        Args:
            guesses: for masks from the block's beginning on, at least `ahead` of them.
            length: length of the answer.
            left: tokens from the block's beginning to the answer's end.
        """
        return min(self.size or BLOCK, left)


class EarlyFill(ABC):
    """Decides when all masks are filled at once. Immutable."""

    @abstractmethod
    def over(self, guesses: Sequence[Guess], progress: float) -> bool:
        """Whether to fill all masks now.

        Args:
            guesses: for all masks of the answer.
            progress: share of steps done before this one.
        """


@dataclass(frozen=True)
class CanvasOptions:
    """How a canvas is filled.

    Attributes:
        masked: the masked-diffusion model; None if the method is only described.
        commit: which guesses are kept.
        blocks: where a block ends.
        remasking: the score that ranks guesses.
        guidance: w of classifier-free guidance: logits are u + (w + 1)(c - u), where u are those with a masked prompt.
        reuse: which KV is kept from the first forward over a block to its last.
        exit: when all masks are filled at once; None for never.
        grammar: the grammar of the answer; None for any text.
    """

    masked: MaskedModel | None
    commit: Commit
    blocks: FixedBlocks
    remasking: Remasking = "confidence"
    guidance: float = 0.0
    reuse: Reuse = "none"
    exit: EarlyFill | None = None
    grammar: CanvasGrammar | None = None

    def share(self, first: int, last: int, length: int) -> int:
        """Steps for tokens first..last-1 of an answer of `length`; any number if nothing is scheduled."""
        return self.commit.share(first, last, length) if isinstance(self.commit, Scheduled) else 1

    def total(self, length: int) -> int:
        """Steps for the whole answer."""
        return self.share(0, length, length) if isinstance(self.commit, Scheduled) else length
