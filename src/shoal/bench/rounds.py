"""Rounds: how many fit into the time, in which order the systems take their turns, and what their figures come to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Figure = dict[str, float]


def figure(values: Iterable[float]) -> Figure:
    """Median and spread."""
    listed = np.fromiter(values, float)
    return {"median": float(np.median(listed)), "min": float(listed.min()), "max": float(listed.max())}


def in_order(items: Sequence[T], round_number: int) -> list[T]:
    """The turns of a round: every other round runs backwards, so that no system always follows the same one."""
    return list(items) if round_number % 2 == 0 else list(reversed(items))


def check_rounds(rounds: int, minutes: float | None = None) -> None:
    """ValueError for what `Rounds` cannot be."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1, and 3 to show a spread")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes is {minutes}; it must be above 0")


class Rounds:
    """Numbers of rounds from 0, once; a round is only begun if it should end within the time. The clock starts here.

    Args:
        asked: most rounds.
        minutes: the time; None for no limit.

    Attributes:
        done: how many have been gone through.
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
        """What a report says about them."""
        return {"asked": self.asked, "done": self.done, "stopped_early": self.done < self.asked}
