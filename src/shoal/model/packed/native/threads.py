"""How many threads a forward gets: as many as the machine has processors for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal.model.packed.native.structs import MAX_THREADS

WINDOW = 0.02
"""Seconds of forwards after which the number is judged: a thread that other work holds up now and then is no reason."""
LOST = 0.4
"""Processors that threads may lose to other work before there are fewer of them."""
REST = (0.1, 3.2)
"""Seconds until all threads are tried again, at first and at most: every trial that fails doubles them."""


class ThreadCount:
    """Follows what the machine gives.

    The threads of a forward wait for each other at every layer, so one that waits for a processor holds up all: beside
    other work fewer are faster. What they lost is known from their processor time.

    Args:
        clock: seconds, from any start.

    Attributes:
        fixed: that many whatever happens, for measuring; None to follow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.fixed: int | None = None
        self._clock = clock
        self._count = self._most = 0
        self._wall = self._had = 0.0
        self._rest, self._trial_at = REST[0], 0.0

    def choose(self, most: int | None = None) -> int:
        """Threads for the next forward, 1 to `most`: what torch uses if that is None."""
        most = min(torch.get_num_threads() if most is None else most, MAX_THREADS)
        if self.fixed is not None:
            return min(self.fixed, MAX_THREADS)
        if most != self._most or (self._count < most and self._clock() >= self._trial_at):
            self._set(most)
            self._most = most
        return self._count

    def note(self, processors: float, seconds: float) -> None:
        """Tell how many processors the threads of a forward had, and how long it took."""
        self._wall += seconds
        self._had += processors * seconds
        if self._wall < WINDOW:
            return
        had = self._had / self._wall
        if self._count - had > LOST and self._count > 1:
            if self._count == self._most and self._trial_at > 0:
                self._rest = min(2 * self._rest, REST[1])
            self._trial_at = self._clock() + self._rest
            self._set(min(self._count - 1, max(1, round(had))))
        else:
            if self._count == self._most:
                self._rest, self._trial_at = REST[0], 0.0
            self._set(self._count)

    def _set(self, count: int) -> None:
        self._count, self._wall, self._had = count, 0.0, 0.0


MACHINE = ThreadCount()
"""Of this process: all models share its processors."""
