"""How wide a verified block should be: the law of acceptance over width, and the measured time of a forward.

Scylla (arXiv 2505.07858) chooses the width at which arithmetic becomes the limit. Here the measured time stands in
for the roofline, and the law of acceptance is fitted to measurements: A(k) = a log10(k) + c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LogLaw:
    """y = slope * log10(x) + intercept.

    Attributes:
        r_squared: share of the variance of y that the line explains.
    """

    slope: float
    intercept: float
    r_squared: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> LogLaw:
        """Least squares through (x, y).

        Raises:
            ValueError: fewer than three points, an x that is not above 0, or all x equal.
        """
        if len(points) < 3 or any(x <= 0 for x, _ in points) or len({x for x, _ in points}) < 2:
            raise ValueError(f"the points are {list(points)}; at least 3 with x above 0, not all equal, are needed")
        logs, values = [math.log10(x) for x, _ in points], [y for _, y in points]
        mean_x, mean_y = sum(logs) / len(logs), sum(values) / len(values)
        spread = sum((x - mean_x) ** 2 for x in logs)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(logs, values, strict=True)) / spread
        intercept = mean_y - slope * mean_x
        left = sum((y - slope * x - intercept) ** 2 for x, y in zip(logs, values, strict=True))
        total = sum((y - mean_y) ** 2 for y in values)
        return cls(slope, intercept, 1 - left / total if total else 1.0)

    def __call__(self, x: float) -> float:
        """The law at x."""
        return self.slope * math.log10(x) + self.intercept


def best_width(seconds: Mapping[int, float], tokens: Callable[[int], float], rows: int = 1) -> int:
    """The block width k, root included, with the most expected tokens per second of a batch.

    Args:
        seconds: measured time of a forward by its tokens in all; a width is considered where `rows * k` was measured.
        tokens: expected tokens that a block of width k brings, 1 for k = 1.
        rows: rows of the batch.

    Raises:
        ValueError: no measured size is a multiple of `rows`.
    """
    widths = sorted(size // rows for size in seconds if size % rows == 0)
    if not widths:
        raise ValueError(f"forwards of {sorted(seconds)} tokens were measured; none is a multiple of {rows} rows")
    return max(widths, key=lambda width: (tokens(width) / seconds[width * rows], -width))
