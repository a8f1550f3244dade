"""Whether samples have one law: Kolmogorov and Smirnov's test on many projections, the energy distance, scores."""

from __future__ import annotations

import torch
from torch import Tensor

PROJECTIONS = 64


def smirnov(one: Tensor, other: Tensor, seed: int = 0) -> tuple[float, float]:
    """The largest distance of distribution functions over coordinates and projections, and its p-value.

    Args:
        one: A sample, (draws, numbers).
        other: The sample beside it.
        seed: Of the `PROJECTIONS` random directions.

    Returns:
        The distance, and the smallest p-value times the number of tests (Bonferroni), at most 1.
    """
    from scipy.stats import ks_2samp

    ways = torch.randn(one.shape[1], PROJECTIONS, generator=torch.Generator().manual_seed(seed))
    tests = [ks_2samp(left.numpy(), right.numpy()) for left, right in
             zip(torch.cat([one, one @ ways], 1).T, torch.cat([other, other @ ways], 1).T, strict=True)]
    return float(max(test.statistic for test in tests)), min(1.0, len(tests) * float(min(t.pvalue for t in tests)))


def energy(one: Tensor, other: Tensor, permutations: int = 99, seed: int = 0) -> tuple[float, float]:
    """The energy distance (Szekely and Rizzo 2004) of two samples of equal size, and its p-value by permutation.

    The distance is 2 E|X - Y| - E|X - X'| - E|Y - Y'|, with all pairs counted.

    Raises:
        ValueError: The samples are not equally large.
    """
    if one.shape != other.shape:
        raise ValueError(f"samples of {len(one)} and {len(other)} draws: they must be equally large; cut the larger")
    both, half = torch.cat([one, other]), len(one)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.ones(2 * half, permutations + 1)
    signs[half:, 0] = -1
    for column in range(1, permutations + 1):
        signs[torch.randperm(2 * half, generator=generator)[:half], column] = -1
    total = torch.zeros(permutations + 1, dtype=torch.float64)
    for start in range(0, 2 * half, 1000):
        part = torch.cdist(both[start:start + 1000], both)
        total -= (signs[start:start + 1000] * (part @ signs)).double().sum(0)
    found = total / half**2
    return float(found[0]), float((1 + (found[1:] >= found[0]).sum()) / (permutations + 1))


def normal(scores: Tensor) -> tuple[float, float]:
    """How far scores (..., numbers) are from independent standard normal ones, and the p-value.

    Kolmogorov and Smirnov's test of the scores and of the sums of their squares, the larger distance; the smaller
    p-value times two.
    """
    from scipy.stats import chi2, kstest, norm

    tests = [kstest(scores.flatten().numpy(), norm.cdf),
             kstest(scores.square().sum(-1).flatten().numpy(), chi2(scores.shape[-1]).cdf)]
    return float(max(test.statistic for test in tests)), min(1.0, 2 * float(min(test.pvalue for test in tests)))
