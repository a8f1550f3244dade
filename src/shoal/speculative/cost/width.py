"""How wide a verified block should be: the law of acceptance over width, and the measured time of a forward.

Scylla (arXiv 2505.07858) chooses the width at which arithmetic becomes the limit. Here the measured time stands in
for the roofline, and the law of acceptance is fitted to measurements: A(k) = a log10(k) + c.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.decode.worker import DraftLengthPolicy, StepReport

if TYPE_CHECKING:
    from shoal.decode.row import Row

_TRIALS = 4
_LASTS = 64


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


@dataclass(frozen=True)
class Width:
    """One block width for the whole batch, found by trial and kept for a while.

    Every width is tried a few times; the law smooths what each brought, the median says what each took. Coarser than
    `Goodput`, which tells rows apart and moves with every step; steadier, and a fixed width suits captured graphs.

    Attributes:
        widths: nodes of a block, root included, at least three of them from 2 on; a plain step is always considered.
    """

    widths: tuple[int, ...] = (2, 4, 8)

    def __post_init__(self) -> None:
        if len(set(self.widths)) < 3 or min(self.widths) < 2:
            raise ValueError(f"widths is {self.widths}; at least 3 different ones from 2 on are needed to fit the law")

    def begin(self, stack: Any, cache: Any) -> WidthPolicy:
        """The state for one batch of rows."""
        return WidthPolicy(self.widths)


class WidthPolicy(DraftLengthPolicy):
    """See `Width`."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._plan = [1, *sorted(set(widths))] * _TRIALS
        self._waiting = self._plan.copy()
        self._tokens: dict[int, list[float]] = defaultdict(list)
        self._seconds: dict[int, list[float]] = defaultdict(list)
        self._width, self._left = 1, 0

    def limits(self, rows: Sequence[Row]) -> list[int]:
        """The same for all rows."""
        if self._left:
            self._left -= 1
        elif self._waiting:
            self._width = self._waiting[0]
        else:
            self._width, self._left, self._waiting = self._best(), _LASTS, self._plan.copy()
            self._tokens.clear()
            self._seconds.clear()
        return [self._width - 1] * len(rows)

    def observe(self, report: StepReport) -> None:
        """What the width brought, and what it took; a trial beside a prompt tells neither and is made again."""
        if report.prompt or report.target_seconds is None:
            return
        if self._waiting[:1] == [self._width] and not self._left:
            self._waiting.pop(0)
        kept = [len(outcome.path) for outcome in report.outcomes]
        self._tokens[self._width].append(sum(kept) / len(kept))
        self._seconds[self._width].append(report.draft_seconds + report.target_seconds)

    def _best(self) -> int:
        law = LogLaw.fit([(width, statistics.mean(found)) for width, found in self._tokens.items()])
        return best_width(
            {width: statistics.median(found) for width, found in self._seconds.items()},
            lambda width: 1.0 if width == 1 else max(1.0, law(width)),
        )


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
