"""Whether other processes keep the machine busy."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_lab.bench.process import cpu_seconds, library

BUSY = 0.1
"""Cores kept busy by others above which a measurement is suspect."""

_FIELDS = ("user", "nice", "system", "irq", "softirq", "steal")
"""Fields of a processor's busy time; guests count as users already. Some systems lack some of them."""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds so far: busy time of all processors, time of our own processes, wall clock."""

    busy: float
    own: float
    clock: float


def snapshot(pids: Sequence[int] = ()) -> CpuTimes | None:
    """Read the counters of the machine, this process and our others `pids`; None if one of these has ended."""
    own = [cpu_seconds(pid) for pid in {os.getpid(), *pids}]
    if None in own:
        return None
    times = library().cpu_times()
    busy = sum(getattr(times, name, 0.0) for name in _FIELDS)
    return CpuTimes(busy, sum(filter(None, own)), time.perf_counter())


def others(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Cores that other processes kept busy between two snapshots; None if unknown."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    return max(0.0, (after.busy - before.busy) - (after.own - before.own)) / (after.clock - before.clock)


def watch(seconds: float, pids: Sequence[int] = ()) -> float | None:
    """Cores that others keep busy during the next `seconds`."""
    before = snapshot(pids)
    time.sleep(seconds)
    return others(before, snapshot(pids))
