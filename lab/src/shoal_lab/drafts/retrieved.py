"""What a drafter reads of a long prompt: its beginning, the pieces most similar to its end, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from shoal.errors import Unsupported

Likeness = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[float]]
"""Scores pieces of a prompt by similarity to its end, all as token ids; higher is more similar."""


@dataclass(frozen=True)
class Retrieved:
    """Shortens a prompt that consists of a long document and a question at the end.

    Attributes:
        context: most tokens to keep; shorter prompts stay whole.
        chunk: tokens of a piece.
        begin, end: tokens of the prompt's beginning and end that stay; pieces are compared with the end.
        likeness: the similarity; None for BM25 over token ids.

    Raises:
        ValueError: beginning, end and one piece do not fit.
    """

    context: int
    chunk: int
    begin: int
    end: int
    likeness: Likeness | None = None

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.begin < 0 or self.end < 1:
            raise ValueError(
                f"chunk is {self.chunk}, begin {self.begin} and end {self.end}; chunk and end must be at least 1 "
                "token, begin at least 0"
            )
        least = self.begin + self.chunk + self.end
        if self.context < least:
            raise ValueError(
                f"context is {self.context}; beginning, end and one chunk already take {least} tokens: raise it, or "
                "lower begin, end or chunk"
            )

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        """The kept tokens of `prompt`, in its order."""
        if len(prompt) <= self.context:
            return list(prompt)
        last = len(prompt) - self.end
        pieces = [prompt[at : min(at + self.chunk, last)] for at in range(self.begin, last, self.chunk)]
        room = (self.context - self.begin - self.end) // self.chunk
        scores = self._scores(pieces, prompt[last:])
        best = sorted(sorted(range(len(pieces)), key=lambda at: (-scores[at], at))[:room])
        return [*prompt[: self.begin], *(token for at in best for token in pieces[at]), *prompt[last:]]

    def _scores(self, pieces: Sequence[Sequence[int]], end: Sequence[int]) -> Sequence[float]:
        scores = [float(score) for score in (self.likeness or bm25)(pieces, end)]
        if len(scores) != len(pieces) or not all(map(isfinite, scores)):
            raise ValueError(
                f"the likeness of {len(pieces)} pieces came as {len(scores)} numbers, of which "
                f"{sum(map(isfinite, scores))} are finite; give one finite number per piece"
            )
        return scores


def bm25(pieces: Sequence[Sequence[int]], query: Sequence[int]) -> list[float]:
    """BM25 of every piece for a query, with token ids as terms.

    Raises:
        Unsupported: the package bm25s is not installed.
    """
    try:
        from bm25s import BM25
    except ImportError as error:
        raise Unsupported(
            "retrieval by BM25", f"it needs bm25s: {error}",
            "pip install 'shoal-lab[retrieval]', or compare pieces by a function of your own",
        ) from error
    index = BM25()
    index.index([[str(token) for token in piece] for piece in pieces], show_progress=False)
    return list(index.get_scores([str(token) for token in dict.fromkeys(query)]))
