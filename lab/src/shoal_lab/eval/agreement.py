"""How far an output agrees with the full model's: first divergence, equal tokens, longest common subsequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """Comparison of two token sequences.

    Attributes:
        first_divergence: index of the first token that differs; the length if they are equal.
        same: whether they are equal.
        token_agreement: share of equal tokens at equal places, of the longer sequence.
        rouge_l: F1 of the longest common subsequence (Lin 2004), over tokens.
    """

    first_divergence: int
    same: bool
    token_agreement: float
    rouge_l: float


def agreement(base: Sequence[int], other: Sequence[int]) -> Agreement:
    """Compare `other` with `base`; two empty sequences agree."""
    equal = [a == b for a, b in zip(base, other, strict=False)]
    first = equal.index(False) if False in equal else len(equal)
    longest = max(len(base), len(other))
    return Agreement(
        first_divergence=first,
        same=list(base) == list(other),
        token_agreement=sum(equal) / longest if longest else 1.0,
        rouge_l=rouge_l(base, other),
    )


def rouge_l(base: Sequence[int], other: Sequence[int]) -> float:
    """F1 of the longest common subsequence; 1 for two empty sequences."""
    if not base or not other:
        return float(len(base) == len(other))
    return 2 * common_subsequence(base, other) / (len(base) + len(other))


def common_subsequence(base: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common subsequence, in len(base) x len(other) time and bits (Hyyro 2004)."""
    places: dict[int, int] = {}
    for index, token in enumerate(base):
        places[token] = places.get(token, 0) | 1 << index
    ones = (1 << len(base)) - 1
    row = ones
    for token in other:
        hits = row & places.get(token, 0)
        row = ((row + hits) | (row - hits)) & ones
    return len(base) - row.bit_count()
