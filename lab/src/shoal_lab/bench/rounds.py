"""Rounds: how many fit into the time, in which order systems take turns, and figures over rounds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from shoal_lab.eval.paired import median_interval

T = TypeVar("T")
Figure = dict[str, float]
Ratio = dict[str, float | None]


def figure(values: Iterable[float]) -> Figure:
    """Median and spread."""
    listed = np.fromiter(values, float)
    return {"median": float(np.median(listed)), "min": float(listed.min()), "max": float(listed.max())}


def ratio(values: Iterable[float]) -> Ratio:
    """A figure with an interval `low` to `high` of the median, at a `confidence` of at least 95 %.

    All three are None below 6 values; see `median_interval`.
    """
    listed = sorted(values)
    low, high, confidence = median_interval(listed) or (None, None, None)
    return {**figure(listed), "low": low, "high": high, "confidence": confidence}


def in_order(items: Sequence[T], round_number: int) -> list[T]:
    """The turns of a round: every other round runs backwards, so that no system always follows the same one."""
    return list(items) if round_number % 2 == 0 else list(reversed(items))


def check_rounds(rounds: int, minutes: float | None = None) -> None:
    """Check arguments of `Rounds`; ValueError."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1, 3 to show a spread, and 6 for 95 % intervals")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes is {minutes}; it must be above 0")


class Rounds:
    """Iterates over round numbers from 0, once. A round only begins if it should end in time; the clock starts here.

    Args:
        asked: most rounds.
        minutes: time limit; None for no limit.

    Attributes:
        done: rounds finished so far.
    """

    def __init__(self, asked: int, minutes: float | None = None) -> None:
        check_rounds(asked, minutes)
        self.asked, self.done, self._minutes, self._start = asked, 0, minutes, time.perf_counter()

    def __iter__(self) -> Iterator[int]:
        while self.done < self.asked:
            began = time.perf_counter()
            yield self.done
            self.done += 1
            now = time.perf_counter()
            if self._minutes is not None and now - self._start + now - began > 60 * self._minutes:
                return

    def to_dict(self) -> dict[str, Any]:
        """The fields of a report."""
        return {"asked": self.asked, "done": self.done, "stopped_early": self.done < self.asked}
