"""Statistics of two methods on the same items, which may come in clusters such as questions on one article.

Comparing pairs removes what the items have in common: the interval of a difference is much narrower than two separate
intervals suggest. Items of a cluster are not independent, so whole clusters are drawn, and whole clusters change sides.
scipy has the same interval and test, but would save no line and be another dependency.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_Z95 = 1.959963984540054
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A mean paired difference, other minus base.

    Attributes:
        mean: the difference.
        low, high: ends of its 95 % interval.
        p: two-sided p-value of no difference.
        n: pairs.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927): low and high."""
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"{right} of {n}; it must be 0..n of at least one item")
    share, z = right / n, _Z95**2 / n
    middle = (share + z / 2) / (1 + z)
    half = math.sqrt(share * (1 - share) * z + z * z / 4) / (1 + z)
    return middle - half, middle + half


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p-value that a discordant pair goes either way with probability 1/2 (McNemar 1947).

    Args:
        lost: items that only the base gets right.
        won: items that only the other gets right.
    """
    n = lost + won
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1))
    return float(min(1, 2 * tail / 2**n))


def accuracy_difference(base: Sequence[bool], other: Sequence[bool]) -> Difference:
    """Difference of two accuracies on the same items, with Wald's paired interval and McNemar's exact p-value.

    The interval has Agresti and Min's adjustment (2005, half a pair added to each cell), so it is not empty if the
    methods agree on every item.
    """
    n = _same_length(base, other)
    lost = sum(b and not o for b, o in zip(base, other, strict=True))
    won = sum(o and not b for b, o in zip(base, other, strict=True))
    c, b, total = won + 0.5, lost + 0.5, n + 2
    middle = (c - b) / total
    half = _Z95 * math.sqrt(max(0.0, (c + b) - (c - b) ** 2 / total)) / total
    return Difference((won - lost) / n, middle - half, middle + half, mcnemar(lost, won), n)


def detectable(base: Sequence[bool], other: Sequence[bool]) -> float:
    """The smallest accuracy difference that this many items detect with power 0.8, at p = 0.05, one-sided.

    n = 6.2 psi / d^2, where psi is the share of verdicts that flip (Connor 1987), with half a pair added in each
    direction: that no verdict flipped says little about few items.
    """
    n = _same_length(base, other)
    flipped = sum(b != o for b, o in zip(base, other, strict=True))
    return math.sqrt(6.2 * (flipped + 1) / (n + 2) / n)


def median_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """An interval of the median, low and high, and its confidence of at least 95 %.

    It holds for any distribution: a value lies below the median in half of all cases (David and Nagaraja, "Order
    Statistics", 7.1). None below 6 values, when even the whole range is not that sure.
    """
    listed, count = sorted(values), len(values)
    missed = [2 * sum(math.comb(count, below) for below in range(out + 1)) / 2**count for out in range(count // 2)]
    sure = [out for out, share in enumerate(missed) if share <= 1 - _CONFIDENCE]
    return (listed[sure[-1]], listed[-1 - sure[-1]], 1 - missed[sure[-1]]) if sure else None


def ratio_difference(
    base: Sequence[float], other: Sequence[float], weights: Sequence[float]
) -> Difference:
    """Difference of two weighted means, such as nats per token from nats and tokens per item.

    Args:
        base, other: totals per item.
        weights: divisor of each total, such as its tokens; the same for both.
    """
    n = _same_length(base, other)
    total = sum(weights)
    mean = (sum(other) - sum(base)) / total
    rests = [o - b - mean * w for b, o, w in zip(base, other, weights, strict=True)]
    error = math.sqrt(n / max(n - 1, 1) * sum(rest * rest for rest in rests)) / total
    p = (math.erfc(abs(mean) / error / math.sqrt(2)) if error > 0 else float(mean == 0)) if n > 1 else 1.0
    return Difference(mean, mean - _Z95 * error, mean + _Z95 * error, p, n)


def holm(ps: Sequence[float]) -> list[float]:
    """P-values adjusted for multiple comparisons (Holm 1979), in the given order."""
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = highest
    return adjusted


def _same_length(base: Sequence[object], other: Sequence[object]) -> int:
    if len(base) != len(other) or not base:
        raise ValueError(f"{len(base)} and {len(other)} outcomes; a paired comparison needs the same, at least one")
    return len(base)


_DRAWS = 9999


def clustered_difference(
    base: Sequence[float], other: Sequence[float], clusters: Sequence[Hashable], seed: int = 0
) -> Difference:
    """Mean paired difference, with the percentile interval of a bootstrap over clusters (Field and Welsh 2007).

    The p-value is that of the sign-flip test: if both methods were alike, the outcomes of a whole cluster could as well
    be swapped.

    Args:
        base, other: outcomes of the same items.
        clusters: the cluster of each item.
        seed: of the draws.
    """
    if not len(base) == len(other) == len(clusters) or not base:
        raise ValueError(f"{len(base)}, {len(other)} outcomes, {len(clusters)} clusters; they must be alike, and some")
    sums: dict[Hashable, float] = {}
    sizes: dict[Hashable, int] = {}
    for before, after, cluster in zip(base, other, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + after - before
        sizes[cluster] = sizes.get(cluster, 0) + 1
    parts = [(sums[cluster], sizes[cluster]) for cluster in sums]
    rng, total = random.Random(seed), sum(sums.values())
    means = sorted(_mean(rng.choices(parts, k=len(parts))) for _ in range(_DRAWS))
    low, high = means[math.floor(0.025 * _DRAWS)], means[math.ceil(0.975 * _DRAWS) - 1]
    near = abs(total) - 1e-9
    far = sum(abs(sum(part if rng.random() < 0.5 else -part for part, _ in parts)) >= near for _ in range(_DRAWS))
    return Difference(total / len(base), low, high, (1 + far) / (1 + _DRAWS), len(base))


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    return sum(part for part, _ in parts) / sum(size for _, size in parts)
