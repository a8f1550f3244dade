"""Chains of one prompt side by side, and a vote of what they answer.

ATTS (arXiv 2509.15148) runs many chains, each of which decides alone when the larger model takes over, and counts what
they come to. Sequences of a batch are independent here, so a chain says what it would say alone; its draws are its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shoal.engine.engine import Engine
from shoal.types import Result

AnswerOf = Callable[[str], str | None]
"""What a text answers, such as its last number; None if it answers nothing."""


def voted(
    engine: Engine, prompt: Any, chains: int, answer_of: AnswerOf, **options: Any
) -> tuple[Result, dict[str, int]]:
    """The first chain that gives the most frequent answer, and how many give each.

    Args:
        engine: decodes the chains together; `options` are those of `Engine.generate`, with a temperature above 0, or
            all chains are alike.

    Raises:
        ValueError: there is no chain.
    """
    if chains < 1:
        raise ValueError(f"chains is {chains}; it must be at least 1")
    results: list[Result] = engine.generate([prompt] * chains, **options)
    place, votes = winner([one.text for one in results], answer_of)
    return results[place], votes


def winner(texts: Sequence[str], answer_of: AnswerOf) -> tuple[int, dict[str, int]]:
    """The earliest text with the most frequent answer, the first one if there is none, and the votes."""
    answers = [answer_of(text) for text in texts]
    votes = Counter(answer for answer in answers if answer is not None)
    return (answers.index(votes.most_common(1)[0][0]) if votes else 0), dict(votes)
