"""Comparing greedy tokens where rounding may break ties: equal, but for places where the reference hardly prefers one.

A forward over several positions is not bitwise the same as one by one in half precision. So the first difference is
excused where the reference's two best logits are closer than a tolerance, and ends the comparison: from there on the
texts have different histories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """How far two sequences of tokens agree.

    Attributes:
        compared: equal tokens before the first difference or the end.
        tie: whether a tie excuses that difference.
        disagreement: the place of a difference that no tie excuses, or None.
        margin: the reference's margin at the difference.
    """

    compared: int
    tie: bool
    disagreement: int | None
    margin: float


def margins(logits: Tensor) -> Tensor:
    """How far the best logit [T, V] is ahead of the second, [T] in float64."""
    best = logits.double().topk(2).values
    return best[:, 0] - best[:, 1]


def compare(tokens: Sequence[int], expected: Sequence[int], logits: Tensor, tolerance: float) -> Comparison:
    """Compare `tokens` with the reference's `expected`, which were taken from `logits` [T, V].

    Raises:
        ValueError: the reference's tokens are not those of its logits, or the lengths differ.
    """
    if not len(tokens) == len(expected) == len(logits) or logits.argmax(-1).tolist() != list(expected):
        raise ValueError("the reference's tokens must be the argmax of its logits, and both sequences as long")
    for place, margin in enumerate(margins(logits).tolist()):
        if tokens[place] != expected[place]:
            tie = margin < tolerance
            return Comparison(place, tie, None if tie else place, margin)
    return Comparison(len(tokens), False, None, float("inf"))


def one_hot(tokens: Sequence[int], vocabulary: int, margin: float) -> Tensor:
    """Logits [T, V] that prefer `tokens` by `margin`; for tests of this file's users."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocabulary) * margin
