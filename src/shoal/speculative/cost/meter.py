"""Whether a method that guesses gains or loses time, from the steps that it decodes anyway."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from shoal.decode.worker import StepReport, Worker

_STEPS = 64
"""Ticks after which a method is judged, again and again."""
_LOSS = 0.95
"""Share of plain decoding's speed below which a method is said to lose time."""
_PLAIN = 3
_STALL = 3.0
"""Longest that a step may seem, in usual ones: the rest is somebody else's work."""


class Meter(Worker):
    """Watches the steps of one method and says once that it loses time.

    What plain decoding would have taken is known from steps without a guess, as at the end of a text. Where there are
    none, a forward over the guesses stands for it: that takes longer, so a loss seen with it is one.

    Args:
        name: of the method.
        tell: called with the words, once.
    """

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self._name, self._tell = name, tell
        self._told = False
        self._rows = 0
        self._begin(0)

    def _begin(self, rows: int) -> None:
        """Count anew, of batches of so many rows: another number makes other times."""
        if rows != self._rows:
            self._plain: deque[float] = deque(maxlen=_STEPS)
            self._wide: deque[float] = deque(maxlen=_STEPS)
        self._rows, self._kept, self._guesses = rows, 0, 0
        self._seconds: list[float] = []

    def observe(self, report: StepReport) -> None:
        """A step in which this method alone decoded."""
        if self._told or report.target_seconds is None:
            return
        if len(report.rows) != self._rows:
            self._begin(len(report.rows))
        guesses = sum(map(len, report.trees)) - self._rows
        (self._wide if guesses else self._plain).append(report.target_seconds)
        self._guesses += guesses
        self._kept += sum(len(outcome.path) - 1 for outcome in report.outcomes)
        self._seconds.append(report.draft_seconds + report.target_seconds)
        if len(self._seconds) == _STEPS:
            self._judge()

    def _judge(self) -> None:
        step = statistics.median(self._plain if len(self._plain) >= _PLAIN else self._wide or self._plain)
        stalled = _STALL * statistics.median(self._seconds)
        speed = (_STEPS + self._kept / self._rows) * step / sum(min(one, stalled) for one in self._seconds)
        if self._guesses and speed < _LOSS:
            self._told = True
            self._tell(
                f"{self._name} is losing time here: {speed:.2f}x of plain decoding over {_STEPS} steps, "
                f"{self._kept / self._guesses:.0%} of its guesses kept. Method auto guesses only where that pays; "
                "method full does not guess"
            )
        self._begin(self._rows)
