"""Biases of scores by distance, learned for a few ranges of them (T5, arXiv 1910.10683, section 2.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def by_distance(buckets: Tensor, farthest: int) -> Tensor:
    """What is added to a score by how far the key is before the query.

    Half of the ranges are single distances, the others grow by powers up to `farthest`.

    Args:
        buckets: biases [ranges, heads].
        farthest: the distance from which on all share the last range.

    Returns:
        [heads, distances], the last one for all that are farther.
    """
    count = len(buckets)
    exact = count // 2
    distances = torch.arange(farthest + 1)
    grown = torch.log(distances.clamp(min=1).float() / exact) / math.log(farthest / exact) * (count - exact)
    ranges = torch.where(distances < exact, distances, (exact + grown.long()).clamp(max=count - 1))
    return buckets[ranges].T.contiguous()


def both_ways(buckets: Tensor, farthest: int, places: int) -> Tensor:
    """The same of a source whose places attend to all: the second half of the ranges are of keys after the query.

    Returns:
        [heads, 2 places - 1], by how far the key is after the query, from 1 - places on.
    """
    distances = torch.arange(places).clamp(max=farthest)
    before, after = (by_distance(half, farthest)[:, distances] for half in buckets.chunk(2))
    return torch.cat([before.flip(1), after[:, 1:]], 1)
