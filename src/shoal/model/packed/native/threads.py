"""The number of threads of a forward: as many as the machine has free processors for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shoal.model.packed.native.library import MAX_THREADS

WINDOW = 0.02
"""Seconds of forwards after which the number is reviewed, so that short disturbances do not count."""
LOST = 0.4
"""Processors that threads may lose to other work before their number is reduced."""
FREE = 0.4
"""Processors that must have been idle before all threads are tried again."""
REST = (0.1, 3.2)
"""Seconds between such trials, at first and at most; each failed trial doubles them."""


def idle_seconds() -> float | None:
    """Idle processor seconds of this machine since it started; None if it does not say."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=5)
        return int(fields[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


class _Here(threading.local):
    """What holds for the calling thread."""

    alone = False


class ThreadCount:
    """Adapts the number of threads to the load of the machine.

    The threads of a forward wait for each other at every layer, so one that waits for a processor delays all of them.
    With other work on the machine, fewer threads are faster. Their processor time shows what they lost; the idle time
    of the machine shows whether more would find room.

    Args:
        clock: returns seconds, from any start.
        idle: returns idle processor seconds, from any start, or None.

    Attributes:
        fixed: a fixed number of threads, for measurements; None to adapt.
        parting: held by a forward whose threads part. There is one at a time: others have no thread to spare, and two
            that wait for each other's models would wait for ever.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, idle: Callable[[], float | None] = idle_seconds
    ) -> None:
        self.fixed: int | None = None
        self.parting = threading.Lock()
        self._here = _Here()
        self._clock, self._idle = clock, idle
        self._count = self._most = 0
        self._wall = self._had = 0.0
        self._rest = REST[0]
        self._fewer_since: tuple[float, float | None] | None = None
        """When threads were last reduced or no room was found for more, and the idle seconds at that time."""

    def choose(self, most: int | None = None) -> int:
        """Threads for the next forward, 1 to `most`; None stands for torch's number of threads."""
        if self._here.alone:
            return 1
        most = min(torch.get_num_threads() if most is None else most, MAX_THREADS)
        if self.fixed is not None:
            return min(self.fixed, MAX_THREADS)
        if most != self._most:
            self._most, self._fewer_since = most, None
            self._set(most)
        elif self._fewer_since is not None and self._count < most and self._has_room(*self._fewer_since):
            self._set(most)
        return self._count

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it the calling thread's forwards have that thread alone, which says nothing about the machine."""
        before, self._here.alone = self._here.alone, True
        try:
            yield
        finally:
            self._here.alone = before

    def _has_room(self, since: float, idle_then: float | None) -> bool:
        """Whether a trial is due and enough processors were idle since the last one."""
        rested = self._clock() - since
        if rested < self._rest:
            return False
        idle = self._idle()
        if idle is None or idle_then is None:
            return True
        self._fewer_since = self._clock(), idle
        return idle - idle_then >= FREE * rested

    def note(self, processors: float, seconds: float) -> None:
        """Record how many processors the threads of a forward had, and its seconds."""
        if self._here.alone:
            return
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
"""The thread count of this process; all its models share the processors."""
