"""Whether the machine is busy with something else. Linux only; elsewhere nothing is known and nothing is claimed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.1
"""Cores kept busy by others from which on a measurement is suspect."""

_IDLE_FIELDS = (3, 4)


@dataclass(frozen=True)
class CpuTimes:
    """Counters at one moment, in seconds: of all processors, of our own processes, of the clock."""

    busy: float
    own: float
    clock: float


def snapshot(pids: Sequence[int] = (), proc: Path = Path("/proc")) -> CpuTimes | None:
    """Read the counters; None where the system has none.

    Args:
        pids: our other processes, besides this one.
        proc: the proc file system.
    """
    try:
        words = (proc / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        own = sum(_process(proc / str(pid) / "stat") for pid in {os.getpid(), *pids})
    except (OSError, ValueError, IndexError):
        return None
    busy = sum(int(word) for index, word in enumerate(words) if index not in _IDLE_FIELDS)
    return CpuTimes(busy / _ticks(), own, time.perf_counter())


def _process(stat: Path) -> float:
    """User and system seconds of a process; the name in parentheses may hold anything."""
    fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _ticks()


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")


def others(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Cores that other processes kept busy between two snapshots; None where that is unknown."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    return max(0.0, (after.busy - before.busy) - (after.own - before.own)) / (after.clock - before.clock)


def watch(seconds: float, pids: Sequence[int] = ()) -> float | None:
    """Cores that others keep busy during the next `seconds`."""
    before = snapshot(pids)
    time.sleep(seconds)
    return others(before, snapshot(pids))
