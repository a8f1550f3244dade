"""Statistics of two methods on items that come in clusters, such as questions on one article.

Items of a cluster are not independent, so whole clusters are drawn, and whole clusters change sides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence

from shoal_lab.eval.paired import Difference

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
