"""How many threads a forward gets: as many as the machine has processors for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.model.packed.native.structs import MAX_THREADS

WINDOW = 0.02
"""Seconds of forwards after which the number is judged: a thread that other work holds up now and then is no reason."""
LOST = 0.4
"""Processors that threads may lose to other work before there are fewer of them."""
FREE = 0.4
"""Processors that must have been idle before all threads are tried again."""
REST = (0.1, 3.2)
"""Seconds from trial to trial, at first and at most: every one that fails doubles them."""


def idle_seconds() -> float | None:
    """Processor seconds that this machine was idle since it started; None where it does not say."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=5)
        return int(words[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


class ThreadCount:
    """Follows what the machine gives.

    The threads of a forward wait for each other at every layer, so one that waits for a processor holds up all: beside
    other work fewer are faster. What they lost is known from their processor time; whether more would find room, from
    what was idle.

    Args:
        clock: seconds, from any start.
        idle: processor seconds that were idle, from any start, or None.

    Attributes:
        fixed: that many whatever happens, for measuring; None to follow.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, idle: Callable[[], float | None] = idle_seconds
    ) -> None:
        self.fixed: int | None = None
        self._clock, self._idle = clock, idle
        self._count = self._most = 0
        self._wall = self._had = 0.0
        self._rest = REST[0]
        self._fewer_since: tuple[float, float | None] | None = None
        """When the number was found too high or no room was found for more, and what was idle until then."""

    def choose(self, most: int | None = None) -> int:
        """Threads for the next forward, 1 to `most`: what torch uses if that is None."""
        most = min(torch.get_num_threads() if most is None else most, MAX_THREADS)
        if self.fixed is not None:
            return min(self.fixed, MAX_THREADS)
        if most != self._most:
            self._most, self._fewer_since = most, None
            self._set(most)
        elif self._fewer_since is not None and self._count < most and self._has_room(*self._fewer_since):
            self._set(most)
        return self._count

    def _has_room(self, since: float, idle_then: float | None) -> bool:
        """Whether it is time for a trial and there were idle processors all the while."""
        rested = self._clock() - since
        if rested < self._rest:
            return False
        idle = self._idle()
        if idle is None or idle_then is None:
            return True
        self._fewer_since = self._clock(), idle
        return idle - idle_then >= FREE * rested

    def note(self, processors: float, seconds: float) -> None:
        """Tell how many processors the threads of a forward had, and how long it took."""
        self._wall += seconds
        self._had += processors * seconds
        if self._wall < WINDOW:
            return
        had = self._had / self._wall
        if self._count - had > LOST and self._count > 1:
            if self._count == self._most and self._fewer_since is not None:
                self._rest = min(2 * self._rest, REST[1])
            self._fewer_since = self._clock(), self._idle()
            self._set(min(self._count - 1, max(1, round(had))))
            return
        if self._count == self._most:
            self._rest, self._fewer_since = REST[0], None
        self._set(self._count)

    def _set(self, count: int) -> None:
        self._count, self._wall, self._had = count, 0.0, 0.0


MACHINE = ThreadCount()
"""Of this process: all models share its processors."""
