"""Losses at equal measured time: what a schedule would lose at a speed between those that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Points = Sequence[tuple[float, float]]
"""Measured speed-up and loss of one schedule."""


def at_time(points: Points, speedup: float) -> float | None:
    """The loss at a measured speed-up, interpolated from (1, 0) through the points; None beyond the fastest.

    A point that is slower than one with a smaller loss is left out: nobody would choose it.
    """
    chosen = [(1.0, 0.0)]
    for time, loss in sorted(points, key=lambda point: point[1]):
        if time > chosen[-1][0]:
            chosen.append((time, loss))
    for (before, low), (after, high) in pairwise(chosen):
        if before <= speedup <= after:
            return low + (high - low) * (speedup - before) / (after - before)
    return None
